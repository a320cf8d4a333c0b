"""Fair share between users, and when queued jobs start."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpufleet.policy.scheduling.fair_share import UsageLedger, advance, usage_step, usage_steps
from tpufleet.policy.scheduling.placement import Occupant
from tpufleet.policy.scheduling.queue_forecast import (
    Claim,
    Forecast,
    QueuedDemand,
    forecast_queue,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WEEK = timedelta(days=7)
hour = timedelta(hours=1)


def test_usage_grows_with_chips_and_time_and_halves():
    start = UsageLedger(at=NOW)
    used = advance(start, {"ada": 16}, NOW + hour, WEEK)
    assert used.usage["ada"] == pytest.approx(16 * 3600, rel=0.01)
    later = advance(used, {}, NOW + hour + WEEK, WEEK)
    assert later.usage["ada"] == pytest.approx(used.usage["ada"] / 2)
    assert advance(later, {}, NOW + 60 * WEEK, WEEK).usage == {}
    assert advance(used, {"ada": 16}, NOW, WEEK) is used  # the clock was set back


@given(st.integers(1, 100), st.integers(1, 10_000), st.integers(1, 10_000))
def test_it_does_not_matter_how_often_usage_is_accounted(chips, first, second):
    middle, end = NOW + timedelta(seconds=first), NOW + timedelta(seconds=first + second)
    start = UsageLedger(at=NOW, usage={"bob": 5e6})
    at_once = advance(start, {"ada": chips}, end, WEEK)
    in_two = advance(advance(start, {"ada": chips}, middle, WEEK), {"ada": chips}, end, WEEK)
    for owner in ("ada", "bob"):
        once, twice = (each.usage.get(owner, 0.0) for each in (at_once, in_two))
        assert twice == pytest.approx(once, rel=1e-6, abs=2)  # next to nothing is forgotten


def test_usage_is_compared_in_steps_of_doubling():
    hours = {0: 0, 0.9: 0, 1: 1, 1.9: 1, 2: 2, 4: 3, 1000: 10}
    assert {each: usage_step(each * 3600) for each in hours} == hours
    assert usage_steps(UsageLedger(at=NOW, usage={"ada": 7200, "bob": 10})) == {"ada": 2}
    assert usage_steps(None) == {}


def running(job, slices=1, hours=None):
    ends = None if hours is None else NOW + hours * hour
    return Occupant(job_id=job, priority=0, since=NOW, slices=slices, ends_by=ends)


def queued(job, slices=1, hours=None, begins=0, owner="mel"):
    runs = None if hours is None else hours * hour
    at = NOW + begins * hour
    return QueuedDemand(job_id=job, slices=slices, runs_for=runs, owner=owner, not_before=at)


def forecast(job, hours, behind=None, until=None):
    at = None if hours is None else NOW + hours * hour
    ends = None if until is None else NOW + until * hour
    return Forecast(job_id=job, starts_at=at, behind=behind, until=ends)


@pytest.mark.parametrize(
    ("queue", "available", "occupants", "expected"),
    [
        ([queued("a")], 1, [], [forecast("a", 0)]),
        ([queued("a")], 0, [running("x", hours=2)], [forecast("a", 2, "x", 2)]),
        ([queued("a")], 0, [running("x")], [forecast("a", None, "x")]),
        (
            [queued("a", hours=1), queued("b")],
            0,
            [running("x", hours=2)],
            [forecast("a", 2, "x", 2), forecast("b", 3, "a", 3)],
        ),
        (
            [queued("a"), queued("b")],
            0,
            [running("x", hours=2)],
            [forecast("a", 2, "x", 2), forecast("b", None, "a")],
        ),
        (
            [queued("a", slices=3)],
            1,
            [running("x", hours=2), running("y", hours=1)],
            [forecast("a", 2, "x", 2)],
        ),
        (
            [queued("a", begins=5), queued("b", hours=1)],
            1,
            [],
            [forecast("a", 5), forecast("b", 0)],
        ),
        ([queued("a", begins=5), queued("b")], 1, [], [forecast("a", None, "b"), forecast("b", 0)]),
        (
            [queued("a", begins=5, hours=1), queued("b", hours=6), queued("c", hours=1)],
            1,
            [],
            [forecast("a", 6, "b", 6), forecast("b", 0), forecast("c", 7, "a", 7)],
        ),
    ],
    ids=[
        "free",
        "known-end",
        "unknown-end",
        "one-after-another",
        "endless-ahead",
        "gang",
        "starts-later",
        "later-behind-an-endless-one",
        "later-but-first",
    ],
)
def test_forecast(queue, available, occupants, expected):
    assert forecast_queue(queue, available, occupants, NOW) == expected


def claim(hours, slices=1, owner="zoe", starts=0):
    start, end = NOW + starts * hour, NOW + hours * hour
    return Claim(owner=owner, slices=slices, starts_at=start, ends_at=end)


@pytest.mark.parametrize(
    ("demand", "available", "claims", "room", "hours"),
    [
        pytest.param({}, 1, [claim(2)], {}, 2, id="reserved by another"),
        pytest.param({}, 2, [claim(2)], {}, 0, id="enough is left"),
        pytest.param({"owner": "zoe"}, 1, [claim(2)], {}, 0, id="its own reservation"),
        pytest.param({}, 1, [claim(3, starts=2)], {}, 0, id="ends before the reservation"),
        pytest.param({"hours": 4}, 1, [claim(3, starts=2)], {}, 3, id="would run into it"),
        pytest.param({}, 1, [claim(2), claim(5, starts=2)], {}, 5, id="one after the other"),
        pytest.param({"begins": 3}, 1, [], {}, 3, id="budget of a later period"),
        pytest.param({}, 1, [], {"mel": 0}, None, id="quota, until an unknown end"),
        pytest.param({}, 1, [], {"mel": 0, "end": 6}, 6, id="quota, until its own job ends"),
        pytest.param({}, 1, [], {"zoe": 0}, 0, id="quota of another"),
    ],
)
def test_forecast_within_limits(demand, available, claims, room, hours):
    job = queued("a", **{"hours": 1, **demand})
    ends = NOW + room["end"] * hour if "end" in room else None
    own = Occupant(job_id="x", priority=0, since=NOW, slices=1, ends_by=ends, owner="mel")
    (found,) = forecast_queue([job], available, [own], NOW, claims, room)
    assert found.starts_at == (None if hours is None else NOW + hours * hour)


def test_jobs_that_reservations_or_quotas_delay_do_not_block_the_queue():
    queue = [queued("a", hours=4), queued("b", hours=1), queued("c", hours=1, owner="zoe")]
    own = Occupant(job_id="x", priority=0, since=NOW, slices=1, ends_by=NOW + 6 * hour, owner="mel")
    reserved = forecast_queue(queue, 1, [], NOW, [claim(3, starts=2)])
    assert [each.starts_at for each in reserved] == [NOW + 3 * hour, NOW, NOW + hour]
    limited = forecast_queue(queue, 1, [own], NOW, room={"mel": 0})
    assert [each.starts_at for each in limited] == [NOW + 6 * hour, NOW + 10 * hour, NOW]


demands = st.builds(queued, st.uuids().map(str), st.integers(1, 4), st.none() | st.integers(1, 9))
occupied = st.builds(running, st.uuids().map(str), st.integers(1, 4), st.none() | st.integers(1, 9))


@given(st.lists(demands, max_size=6), st.integers(0, 4), st.lists(occupied, max_size=4))
def test_nobody_starts_before_the_job_ahead(queue, available, occupants):
    starts = [each.starts_at for each in forecast_queue(queue, available, occupants, NOW)]
    known = [start for start in starts if start is not None]
    assert known == sorted(known) and starts[: len(known)] == known
