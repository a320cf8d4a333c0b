"""How many slices an elastic job runs on: when it starts with fewer than it asks for, and when it
is restarted to get more.

It goes on without a lost slice at once, since the attempt has ended anyway. More slices cost a
restart. So it waits for them only shortly at a start, and takes them later at a checkpoint, the
more rarely the more restarts there were.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from itertools import pairwise

from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice
from tpufleet.model.job.attempts import Attempt, AttemptState
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import JobSpec

# Slices that are requested together become ready within this of each other. Those that take longer
# may take hours.
GATHER_FOR = timedelta(minutes=1)
# How long an attempt runs at least before it is stopped to get more slices: longer than a restart
# takes. Doubles with each restart within the last hour.
FIRST_GROWTH, LONGEST_GROWTH = timedelta(minutes=1), timedelta(minutes=16)
RESTARTS_WITHIN = timedelta(hours=1)
_RESTARTS = frozenset(
    {EndReason.PREEMPTED, EndReason.MAINTENANCE, EndReason.HOST_LOST, EndReason.RESIZED}
)


def gathers_until(
    spec: JobSpec, held: Collection[TpuSlice], attempts: Sequence[Attempt]
) -> datetime | None:
    """Until when a job with enough ready slices waits for those on their way; None: not at all, as
    where enough are left of the last attempt."""
    ready = _ready_since(held)
    if len(ready) >= spec.max_slices or len(held) == len(ready):
        return None
    left = {tpu_slice.id for tpu_slice in held} & set(attempts[-1].slices if attempts else ())
    return None if len(left) >= spec.min_slices else ready[spec.min_slices - 1] + GATHER_FOR


def grows_at(
    spec: JobSpec, attempts: Sequence[Attempt], held: Collection[TpuSlice]
) -> datetime | None:
    """From when the running attempt, the last one, may be stopped at its next checkpoint, because
    the job holds ready slices that it does not use. None: it uses them all."""
    attempt = attempts[-1]
    spare = [tpu_slice for tpu_slice in held if tpu_slice.id not in attempt.slices]
    ready = _ready_since(spare)
    if attempt.state is not AttemptState.RUNNING or attempt.running_at is None or not ready:
        return None
    gathered = ready[0] + GATHER_FOR if len(spare) > len(ready) else ready[0]
    return max(gathered, attempt.running_at + _shortest_run(attempts))


def missing(spec: JobSpec, held: int) -> int:
    """How many slices to request: first those that it cannot run without, all together."""
    return (spec.min_slices if held < spec.min_slices else spec.max_slices) - held


def size(spec: JobSpec, slices: Collection[SliceId]) -> str:
    """`3 of 4`, or `4` where it has all."""
    whole = len(slices) >= spec.max_slices
    return f"{len(slices)}" if whole else f"{len(slices)} of {spec.max_slices}"


def cause(attempts: Sequence[Attempt]) -> str:
    """Why the last attempt has fewer slices than the job asks for."""
    for before, after in reversed(list(pairwise(attempts))):
        if len(before.slices) > len(after.slices):
            return before.message
    return "no more were ready when it started"


def _shortest_run(attempts: Sequence[Attempt]) -> timedelta:
    began = attempts[-1].running_at
    assert began is not None
    restarts = sum(
        attempt.end_reason in _RESTARTS
        and attempt.ended_at is not None
        and attempt.ended_at >= began - RESTARTS_WITHIN
        for attempt in attempts[:-1]
    )
    return min(FIRST_GROWTH * 2 ** min(max(0, restarts - 1), 10), LONGEST_GROWTH)


def _ready_since(held: Collection[TpuSlice]) -> list[datetime]:
    """Since when the job has had each ready slice, oldest first."""
    return sorted(
        max(
            tpu_slice.ready_at or tpu_slice.requested_at,
            tpu_slice.assigned_at or tpu_slice.requested_at,
        )
        for tpu_slice in held
        if tpu_slice.state is SliceState.READY
    )
