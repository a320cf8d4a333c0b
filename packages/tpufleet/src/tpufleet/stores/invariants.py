"""What every store must reject or merge. Pure; the stores pass in what they hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum

from tpufleet.errors import Conflict, Fenced
from tpufleet.model.job.attempts import Attempt, AttemptId
from tpufleet.model.job.jobs import Job, JobId
from tpufleet.model.job.lifecycle import can_reach
from tpufleet.stores.records import Lease


def check_new_job_ids(new_jobs: Sequence[Job], taken: Collection[JobId]) -> None:
    seen: set[JobId] = set()
    for job in new_jobs:
        if job.id in taken or job.id in seen:
            raise Conflict(f"job id {job.id!r} is taken; choose another")
        seen.add(job.id)


def check_required_user(name: str, exists: bool) -> None:
    if name and not exists:
        raise Conflict(f"user {name} was deleted")


def check_transitions(
    kind: str, states: Iterable[tuple[str, StrEnum]], stored: Iterable[tuple[str, StrEnum]]
) -> None:
    """Both by id. What is not stored yet may start in any state."""
    known = dict(stored)
    for key, after in states:
        before = known.get(key)
        if before is not None and not can_reach(before, after):
            raise Conflict(f"{kind} {key!r} cannot go from {before} to {after}")
        known[key] = after


def attempts_to_write(
    attempts: Sequence[Attempt], stored: Mapping[AttemptId, Attempt]
) -> list[Attempt]:
    """Without those already stored as ended. A change to one of these is a conflict."""
    ended = {key: attempt for key, attempt in stored.items() if not attempt.live}
    changed: list[Attempt] = []
    for attempt in attempts:
        before = ended.get(attempt.id)
        if before is None:
            changed.append(attempt)
            if not attempt.live:
                ended[attempt.id] = attempt
        elif before != attempt:
            raise Conflict(f"attempt {attempt.id!r} has ended and cannot change")
    check_transitions(
        "attempt",
        ((attempt.id, attempt.state) for attempt in changed),
        ((attempt.id, attempt.state) for attempt in stored.values()),
    )
    return changed


def check_fence(fence: Lease, holder: str | None, token: int) -> None:
    """`holder` and `token` are the stored ones. Expiry does not matter here: an expired lease
    that no other holder acquired still excludes every other writer."""
    if holder != fence.holder or token != fence.token:
        raise Fenced(
            f"{fence.holder!r} no longer holds the lease {fence.name!r} "
            f"(token {fence.token}; now {token}, holder {holder!r})"
        )
