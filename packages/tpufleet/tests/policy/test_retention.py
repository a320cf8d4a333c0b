"""What is deleted: by age, then the oldest until the rest fits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpufleet.model.people.retention_rules import RetentionRule, RetentionRules
from tpufleet.policy.accounting.retention import StoredFiles, choose

NOW = datetime(2026, 6, 1, tzinfo=UTC)
DAY = timedelta(days=1)


def files(*days_and_sizes: tuple[int, int]) -> list[StoredFiles]:
    return [
        StoredFiles(job_id=f"job-{days}", ended_at=NOW - days * DAY, size=size)
        for days, size in days_and_sizes
    ]


@pytest.mark.parametrize(
    ("rule", "in_use", "deleted"),
    [
        (RetentionRule(), 0, []),
        (RetentionRule(age=30 * DAY), 0, ["job-90", "job-31"]),
        (RetentionRule(size=300), 0, ["job-90"]),
        (RetentionRule(size=300), 100, ["job-90", "job-31"]),
        (RetentionRule(size=300), 10_000, ["job-90", "job-31", "job-30", "job-1"]),
        (RetentionRule(age=60 * DAY, size=250), 0, ["job-90", "job-31"]),
    ],
    ids=["no rule", "age", "size", "live jobs count", "live jobs are not deleted", "both"],
)
def test_the_oldest_are_deleted_first(rule, in_use, deleted):
    ended = files((1, 100), (31, 100), (90, 100), (30, 100))
    chosen = choose(ended, in_use, rule, NOW, "logs")
    assert [deletion.files.job_id for deletion in chosen] == deleted
    assert all("retention.logs." in deletion.reason for deletion in chosen)


@given(
    st.lists(st.tuples(st.integers(0, 999), st.integers(0, 50)), max_size=20, unique=True),
    st.integers(0, 500),
)
def test_what_is_left_fits_or_nothing_is_left(days_and_sizes, limit):
    ended = files(*days_and_sizes)
    gone = {id(each.files) for each in choose(ended, 0, RetentionRule(size=limit), NOW, "logs")}
    left = [each for each in ended if id(each) not in gone]
    assert not left or sum(each.size for each in left) <= limit


def test_checkpoints_are_kept_by_default():
    assert RetentionRules().checkpoints == RetentionRule()
