"""Events that record policy decisions, each with one sentence for people."""

from __future__ import annotations

from datetime import datetime

from tpufleet.model.events import Event, EventKind
from tpufleet.model.fleet.slices import SliceState, TpuSlice
from tpufleet.model.job.attempts import Attempt
from tpufleet.model.job.jobs import Job


def count_of(number: int, noun: str) -> str:
    """`1 host`, `4 hosts`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def job_event(job: Job, now: datetime) -> Event:
    return Event(at=now, kind=EventKind.JOB, state=job.state, message=job.reason, job_id=job.id)


def attempt_event(attempt: Attempt, state: str, message: str, now: datetime) -> Event:
    return Event(
        at=now,
        kind=EventKind.ATTEMPT,
        state=state,
        message=message,
        job_id=attempt.job_id,
        attempt_id=attempt.id,
    )


def slice_event(tpu_slice: TpuSlice, now: datetime) -> Event:
    gone = tpu_slice.state is SliceState.GONE
    state = tpu_slice.state if gone or tpu_slice.loss is None else tpu_slice.loss
    return Event(
        at=now,
        kind=EventKind.SLICE,
        state=state,
        message=f"slice {tpu_slice.id}{' is deleted' if gone else f': {tpu_slice.reason}'}",
        job_id=tpu_slice.job_id,
        slice_id=tpu_slice.id,
        pool=tpu_slice.pool,
    )
