"""Families of jobs: those that came from one another by resume or rerun. They share checkpoints
and code, so they are cleaned away together, judged by the last of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime

from tpufleet.model.jobs import Job, JobId, JobState


@dataclass(frozen=True, slots=True)
class JobLineage:
    jobs: tuple[Job, ...]  # oldest first

    @property
    def last(self) -> Job:
        return self.jobs[-1]

    @property
    def live(self) -> Job | None:
        return next((job for job in self.jobs if not job.ended), None)

    def can_be_cleaned(self, states: Collection[JobState], before: datetime) -> bool:
        """It has ended, in one of these states, and not after this moment."""
        if self.live is not None or self.last.state not in states:
            return False
        return all(job.ended_at is not None and job.ended_at <= before for job in self.jobs)


def job_lineages(jobs: Iterable[Job]) -> list[JobLineage]:
    """In the order of their oldest members."""
    known = {job.id: job for job in jobs}
    members: defaultdict[JobId, list[tuple[datetime, int, JobId, Job]]] = defaultdict(list)
    for job in known.values():
        first, generation = job, 0
        while first.parent in known:
            first, generation = known[first.parent], generation + 1
        members[first.id].append((job.submitted_at, generation, job.id, job))
    found = [
        JobLineage(tuple(member[-1] for member in sorted(each, key=lambda member: member[:3])))
        for each in members.values()
    ]
    return sorted(found, key=lambda family: (family.jobs[0].submitted_at, family.jobs[0].id))
