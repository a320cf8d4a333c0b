"""Lineages: jobs derived from one another by resume or rerun. The rules of retention keep the files
of a lineage until all of it has ended; a request of a user is about the jobs that it names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime

import msgspec

from tpufleet.model.job.jobs import Job, JobId


class JobLineage(msgspec.Struct, frozen=True):
    jobs: tuple[Job, ...]  # oldest first

    @property
    def last(self) -> Job:
        return self.jobs[-1]

    @property
    def live(self) -> Job | None:
        return next((job for job in self.jobs if not job.ended), None)

    def ended_by(self, moment: datetime) -> bool:
        return all(job.ended_at is not None and job.ended_at <= moment for job in self.jobs)


def job_lineages(jobs: Iterable[Job]) -> list[JobLineage]:
    """Ordered by their oldest jobs."""
    known = {job.id: job for job in jobs}
    members: defaultdict[JobId, list[tuple[datetime, int, JobId, Job]]] = defaultdict(list)
    for job in known.values():
        root, depth = job, 0
        while root.parent in known:
            root, depth = known[root.parent], depth + 1
        members[root.id].append((job.submitted_at, depth, job.id, job))
    lineages = [
        JobLineage(tuple(member[-1] for member in sorted(group, key=lambda member: member[:3])))
        for group in members.values()
    ]
    return sorted(lineages, key=lambda lineage: (lineage.jobs[0].submitted_at, lineage.jobs[0].id))
