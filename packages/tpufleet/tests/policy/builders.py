"""Builders of small complete model objects for policy tests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tpufleet.model.fleet.hosts import Exit, Host, Phase, host_id
from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice
from tpufleet.model.job.attempts import Attempt, AttemptState, attempt_id
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import Capacity, Job, JobId, JobSpec

NOON = datetime(2026, 4, 5, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
JOB = JobId("job")


def after(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def make_job(job_id: str = JOB, *, owner: str = "ada", submitted_at=NOON, **options) -> Job:
    of_job = {"state", "reason", "cancel_requested_by", "not_before", "fresh_from", "ended_at"}
    kept = {key: options.pop(key) for key in of_job & set(options)}
    spec = JobSpec(
        **{"name": job_id, "command": ("true",), "accelerator": "v5litepod-16", **options}
    )
    return Job(id=JobId(job_id), spec=spec, owner=owner, submitted_at=submitted_at, **kept)


def make_attempt(number: int = 0, *, slices=("s0",), job_id: str = JOB, **options) -> Attempt:
    return Attempt(
        **{
            "id": attempt_id(JobId(job_id), number),
            "job_id": JobId(job_id),
            "number": number,
            "slices": tuple(SliceId(name) for name in slices),
            "created_at": NOON,
            "state": AttemptState.RUNNING,
            **options,
        }
    )


def ended_attempt(number: int, reason: EndReason, start=None, reached=None, **options) -> Attempt:
    return make_attempt(
        number,
        state=AttemptState.ENDED,
        end_reason=reason,
        running_at=NOON,
        ended_at=NOON + MINUTE,
        start_step=start,
        checkpoint_step=reached,
        message=f"ended by {reason}",
        **options,
    )


def make_slice(name: str = "s0", *, state=SliceState.READY, **options) -> TpuSlice:
    return TpuSlice(
        **{
            "id": SliceId(name),
            "provider": "fake",
            "accelerator": "v5litepod-16",
            "zone": "z1",
            "capacity": Capacity.SPOT,
            "request_group": "o",
            "requested_at": NOON,
            "job_id": JOB,
            "state": state,
            **options,
        }
    )


def make_host(index: int = 0, slice_name: str = "s0", *, attempt=None, **options) -> Host:
    slice_id = SliceId(slice_name)
    return Host(
        **{
            "id": host_id(slice_id, index),
            "slice_id": slice_id,
            "index": index,
            "attempt_id": attempt.id if attempt else None,
            "phase": Phase.RUNNING if attempt else Phase.IDLE,
            "up_at": NOON,
            **options,
        }
    )


def exited(attempt: Attempt, index: int = 0, slice_name: str = "s0", **how) -> Host:
    """A host whose workload is gone; with status 1 by default."""
    if "signal" not in how:
        how.setdefault("status", 1)
    how.setdefault("at", NOON)
    return make_host(index, slice_name, attempt=attempt, phase=Phase.EXITED, exit=Exit(**how))
