"""Letting go: of one slice, of what a job no longer needs, and of everything when a job ends."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from tpufleet.model.endings import EndReason
from tpufleet.model.jobs import JobState
from tpufleet.model.slices import LossReason, SliceId, SliceState, TpuSlice
from tpufleet.policy import telling
from tpufleet.policy.job_views import JobView, Step


def release_slice(tpu_slice: TpuSlice, loss: LossReason, reason: str, now: datetime) -> TpuSlice:
    """Give a slice up: it is to be deleted, whatever is left of it."""
    return replace(
        tpu_slice,
        state=SliceState.RELEASING,
        loss=loss,
        reason=reason,
        lost_at=tpu_slice.lost_at or now,
    )


def release_job_slices(view: JobView, result: Step, now: datetime, only: set[SliceId] | None = None) -> Step:
    """Hand slices back: to their pool if they are healthy and quiet, else to the provider."""
    changed = {tpu_slice.id: tpu_slice for tpu_slice in result.slices}
    for slice_id, before in view.slices.items():
        tpu_slice = changed.get(slice_id, before)
        if tpu_slice.job_id != view.job.id or (only is not None and slice_id not in only):
            continue
        if tpu_slice.state in (SliceState.RELEASING, SliceState.GONE):
            continue
        if tpu_slice.pool and tpu_slice.state is not SliceState.DOOMED:
            freed = replace(tpu_slice, job_id=None, idle_since=now, reason="free")
        else:
            freed = release_slice(tpu_slice, tpu_slice.loss or LossReason.RELEASED, "no longer needed", now)
            result.events.append(telling.slice_event(freed, now))
        changed[slice_id] = freed
    result.slices = list(changed.values())
    return result


def end_job(
    view: JobView, result: Step, state: JobState, end_reason: EndReason, now: datetime
) -> Step:
    """The job is over: say so, and hand everything back."""
    reason = result.job.reason
    if state is JobState.CANCELLED:
        reason = f"cancelled by {view.job.cancel_requested_by}"
    result.job = replace(
        result.job,
        state=state,
        reason=reason,
        ended_at=now,
        ended_because=end_reason,
        not_before=None,
    )
    result.events.append(telling.job_event(result.job, now))
    result.wake_at = None
    return release_job_slices(view, result, now)
