"""The series of a job over all of its attempts."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.policy.builders import after, make_attempt
from tpufleet.model.job.jobs import JobId
from tpufleet.model.job.metric_points import MetricPoint
from tpufleet.service.jobs.metric_series import each_step_once


def series(*attempts: list[int | None]) -> list[int | None]:
    """The steps that are left of those that each attempt reported, one a second."""
    moment, rows, points = 0, [], []
    for number, steps in enumerate(attempts):
        rows.append(make_attempt(number, created_at=after(moment)))
        for step in steps:
            moment += 1
            points.append(point(moment, step))
        moment += 1
    kept = each_step_once(points, rows)
    assert [each.at for each in kept] == sorted(each.at for each in kept)
    return [each.step for each in kept]


def point(seconds: int, step: int | None, **values: float) -> MetricPoint:
    return MetricPoint(job_id=JobId("job"), at=after(seconds), step=step, values=values)


@pytest.mark.parametrize(
    ("attempts", "left"),
    [
        pytest.param([[1, 2, 3]], [1, 2, 3], id="one attempt"),
        pytest.param(
            [[20, 21, 22, 23], [21, 22, 23, 24]], [20, 21, 22, 23, 24], id="steps are repeated"
        ),
        pytest.param([[1, 2], [], [3, 4]], [1, 2, 3, 4], id="nothing is repeated"),
        pytest.param([[1, 2, 3, 4], [3], [3, 4]], [1, 2, 3, 4], id="repeated twice"),
        pytest.param([[1, 2, 3], [1]], [1], id="from scratch"),
        pytest.param([[1, None, 2, None], [2]], [1, None, None, 2], id="points without a step"),
        pytest.param(
            [[1, 2, 3, 1, 2, 3, 1, 2], [1, 2, 3]],
            [1, 2, 3, 1, 2, 3, 1, 2, 3],
            id="steps of epochs",
        ),
        pytest.param([[24, 25, 25], [26]], [24, 25, 26], id="a step that is reported twice"),
    ],
)
def test_each_step_of_a_job_is_there_once(attempts, left):
    assert series(*attempts) == left


def test_the_points_of_the_last_attempt_are_kept():
    rows = [make_attempt(0), make_attempt(1, created_at=after(10))]
    points = [point(1, 5, loss=3.0), point(11, 5, loss=2.0), point(12, 5, accuracy=0.5)]
    assert each_step_once(points, rows) == [point(12, 5, loss=2.0, accuracy=0.5)]


def test_what_came_before_the_first_attempt_by_another_clock_is_kept():
    rows = [make_attempt(0, created_at=after(0) + timedelta(seconds=1))]
    assert len(each_step_once([point(0, 1)], rows)) == 1
