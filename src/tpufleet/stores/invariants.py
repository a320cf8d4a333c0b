"""What every store must refuse or merge, told once. Pure; the stores supply what they hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tpufleet.errors import Conflict, Fenced
from tpufleet.model.attempts import Attempt, AttemptId
from tpufleet.model.hosts import HostLiveness
from tpufleet.model.jobs import Job, JobId
from tpufleet.stores.base import Lease


def check_new_job_ids(new_jobs: Sequence[Job], taken: Collection[JobId]) -> None:
    seen: set[JobId] = set()
    for job in new_jobs:
        if job.id in taken or job.id in seen:
            raise Conflict(f"job id {job.id!r} is taken; choose another")
        seen.add(job.id)


def attempts_to_write(
    attempts: Sequence[Attempt], ended: Mapping[AttemptId, Attempt]
) -> list[Attempt]:
    """All but those already recorded as ended. One of these that would change is a conflict."""
    known = dict(ended)
    wanted: list[Attempt] = []
    for attempt in attempts:
        before = known.get(attempt.id)
        if before is None:
            wanted.append(attempt)
            if not attempt.live:
                known[attempt.id] = attempt
        elif before != attempt:
            raise Conflict(f"attempt {attempt.id!r} has ended and never changes again")
    return wanted


def check_fence(fence: Lease, holder: str | None, token: int) -> None:
    """`holder` and `token` are those on record. Time plays no part: a lease that ran out and that
    nobody took over still keeps everybody else out."""
    if holder != fence.holder or token != fence.token:
        raise Fenced(
            f"{fence.holder!r} no longer holds the lease {fence.name!r} "
            f"(token {fence.token}; now {token}, held by {holder or 'nobody'!r})"
        )


def merge_liveness(older: HostLiveness | None, newer: HostLiveness) -> HostLiveness:
    """The last write wins; but the time a host was last seen never goes back, and the progress of
    an attempt stays known until the host works on another."""
    if older is None:
        return newer
    same = newer.attempt_id == older.attempt_id
    progress = older.progress if newer.progress is None and same else newer.progress
    return replace(newer, seen_at=max(older.seen_at, newer.seen_at), progress=progress)
