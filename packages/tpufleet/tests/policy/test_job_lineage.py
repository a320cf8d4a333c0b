"""Which jobs form a lineage, and when it can be archived."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import MINUTE, NOON, make_job
from tpufleet.model.job.jobs import ENDED_STATES, JobId, JobState
from tpufleet.policy.job_lineage import JobLineage, job_lineages

FAILED, SUCCEEDED = JobState.FAILED, JobState.SUCCEEDED


def job(name, parent=None, state=FAILED, *, at=0, lasted=1):
    submitted = NOON + at * MINUTE
    ended = submitted + lasted * MINUTE if state in ENDED_STATES else None
    job = make_job(name, submitted_at=submitted, state=state, ended_at=ended)
    return replace(job, parent=JobId(parent) if parent else None)


def names(lineages):
    return [[each.id for each in lineage.jobs] for lineage in lineages]


def test_a_lineage_holds_all_jobs_derived_from_one():
    jobs = [
        job("c", "b", at=3), job("a"), job("x", at=1), job("b", "a", at=2), job("d", "a", at=4),
    ]  # fmt: skip
    assert names(job_lineages(jobs)) == [["a", "b", "c", "d"], ["x"]]


def test_a_child_of_the_same_moment_comes_after_its_parent():
    (lineage,) = job_lineages([job("a", "z"), job("z")])
    assert lineage.last.id == "a"


def test_a_child_of_an_unknown_parent_starts_a_lineage():
    assert names(job_lineages([job("b", "gone")])) == [["b"]]


@given(st.lists(st.integers(min_value=-1, max_value=30), max_size=20))
def test_every_job_is_in_one_lineage_and_parents_come_first(parents):
    jobs = [
        job(f"j{index}", f"j{parent}" if 0 <= parent < index else None, at=index)
        for index, parent in enumerate(parents)
    ]
    lineages = job_lineages(reversed(jobs))
    assert sorted(each.id for lineage in lineages for each in lineage.jobs) == sorted(
        each.id for each in jobs
    )
    for lineage in lineages:
        seen = set()
        for index, member in enumerate(lineage.jobs):
            assert (member.parent in seen) == (index > 0)
            seen.add(member.id)


def test_a_lineage_is_kept_until_all_of_it_has_ended_long_enough():
    lineage = JobLineage((job("a", lasted=30), job("b", "a", at=1, lasted=5)))
    assert not lineage.ended_by(NOON + 29 * MINUTE)
    assert lineage.ended_by(NOON + 30 * MINUTE)
    live = job("c", "b", JobState.QUEUED, at=2)
    assert not JobLineage((*lineage.jobs, live)).ended_by(NOON + 30 * MINUTE)
