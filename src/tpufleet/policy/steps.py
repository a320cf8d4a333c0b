"""The next step of one job, from everything known about it. The heart of a tick.

A job without a live attempt gets one when its whole gang is ready; a live attempt is followed
(`following`) until it has ended, and only then may the next start.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from tpufleet.model.attempts import Attempt, AttemptState, attempt_id
from tpufleet.model.endings import EndReason
from tpufleet.model.jobs import JobState
from tpufleet.model.slices import LossReason, SliceState, TpuSlice
from tpufleet.policy import following, handing_back, telling
from tpufleet.policy.handing_back import release_slice
from tpufleet.policy.job_views import JobView, Step
from tpufleet.policy.telling import slice_event

__all__ = ["JobView", "Step", "fail_job", "release_slice", "missing_slices", "slice_event", "next_step"]


def next_step(view: JobView, now: datetime) -> Step:
    """One step; calling it again with its own result changes nothing more."""
    if view.job.ended:
        return handing_back.release_job_slices(view, Step(job=view.job), now)
    if view.attempt is None:
        return _prepare(view, now)
    return following.follow_attempt(view, view.attempt, now)


def missing_slices(view: JobView, now: datetime) -> int:
    """How many slices to look for now. A doomed slice is replaced before it is gone."""
    job = view.job
    if job.ended or job.cancel_requested_by or (job.not_before and job.not_before > now):
        return 0
    if view.attempt is not None and not following.will_retry(view, view.attempt, now):
        return 0
    return max(0, job.spec.slices - len(view.usable_slices))


def _prepare(view: JobView, now: datetime) -> Step:
    job = view.job
    if job.cancel_requested_by:
        result = Step(job=job)
        return handing_back.end_job(view, result, JobState.CANCELLED, EndReason.CANCELLED, now)
    result = Step(job=job, wake_at=job.not_before if _later(job.not_before, now) else None)
    for tpu_slice in view.slices.values():
        if tpu_slice.state is SliceState.DOOMED and tpu_slice.job_id == job.id:
            result.slices.append(
                release_slice(tpu_slice, tpu_slice.loss or LossReason.PREEMPTED, tpu_slice.reason, now)
            )
    gang = view.usable_slices
    ready = [tpu_slice for tpu_slice in gang if tpu_slice.state is SliceState.READY]
    if len(ready) >= job.spec.slices and not _later(job.not_before, now):
        return _start(view, result, ready[: job.spec.slices], now)
    if job.state in (JobState.QUEUED, JobState.WAITING):
        state = JobState.WAITING if gang else JobState.QUEUED
        if gang and (state is not job.state or job.reason != _waiting_words(gang)):
            result.job = replace(job, state=state, reason=_waiting_words(gang))
        elif not gang and job.state is JobState.WAITING:
            result.job = replace(job, state=state, reason="looks for capacity")
        if result.job.state is not job.state:
            result.events.append(telling.job_event(result.job, now))
    elif job.state is JobState.RECOVERING and gang and job.reason != _waiting_words(gang):
        result.job = replace(job, reason=_waiting_words(gang))
    return result


def _start(view: JobView, result: Step, gang: list[TpuSlice], now: datetime) -> Step:
    """A new attempt on a whole gang. Slices keep the order they were asked for in."""
    job = view.job
    gang.sort(key=lambda tpu_slice: (tpu_slice.requested_at, tpu_slice.id))
    number = len(view.attempts)
    steps = [
        attempt.checkpoint_step
        for attempt in view.attempts[job.fresh_from :]
        if attempt.checkpoint_step
    ]
    attempt = Attempt(
        id=attempt_id(job.id, number),
        job_id=job.id,
        number=number,
        slices=tuple(tpu_slice.id for tpu_slice in gang),
        created_at=now,
        start_step=max(steps, default=None),
    )
    where = ", ".join(sorted({f"{item.zone} ({item.capacity})" for item in gang}))
    words = f"attempt {number} starts on {len(gang)} × {job.spec.accelerator} in {where}"
    result.job = replace(job, state=JobState.STARTING, reason=words, not_before=None)
    result.attempt = attempt
    result.events.append(telling.attempt_event(attempt, AttemptState.STARTING, words, now))
    result.wake_at = None
    return result


def fail_job(view: JobView, reason: str, advice: str, now: datetime) -> Step:
    """End a job that can never be placed."""
    job = replace(view.job, reason=reason, advice=advice)
    return handing_back.end_job(view, Step(job=job), JobState.FAILED, EndReason.SETUP_FAILED, now)


def _waiting_words(gang: tuple[TpuSlice, ...]) -> str:
    ready = sum(1 for tpu_slice in gang if tpu_slice.state is SliceState.READY)
    where = ", ".join(sorted({f"{item.zone} ({item.capacity})" for item in gang}))
    return f"waits for slices in {where}: {ready} of {len(gang)} ready"


def _later(moment: datetime | None, now: datetime) -> bool:
    return moment is not None and moment > now
