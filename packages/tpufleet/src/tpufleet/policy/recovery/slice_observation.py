"""How a provider's listing, or a notice, changes the record of a slice."""

from __future__ import annotations

from datetime import datetime, timedelta

from tpufleet.model.fleet.cloud_slices import CloudSlice, CloudState
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.slices import LossReason, SliceState, TpuSlice
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.values.records import replace
from tpufleet.policy.recovery.job_step import release_slice
from tpufleet.policy.recovery.liveness import AGENT_LEASE

# To see in a listing that the end is near, to tell the agents, and to shut the machines down.
END_MARGIN = timedelta(minutes=2)
_NOTICES = {
    NoticeKind.PREEMPTED: LossReason.PREEMPTED,
    NoticeKind.MAINTENANCE: LossReason.MAINTENANCE,
}


def apply_cloud_slice(tpu_slice: TpuSlice, cloud: CloudSlice, now: datetime) -> TpuSlice:
    """The slice after the provider listed it. The same object when nothing changed."""
    if cloud.capacity is not None and cloud.capacity is not tpu_slice.capacity:
        tpu_slice = replace(tpu_slice, capacity=cloud.capacity)
    if cloud.fenced and not tpu_slice.fenced:
        tpu_slice = replace(tpu_slice, fenced_at=now)
    if tpu_slice.state in (SliceState.RELEASING, SliceState.GONE):
        return tpu_slice
    waiting = tpu_slice.state in (SliceState.REQUESTED, SliceState.BOOTING)
    booting = waiting and tpu_slice.silent_since is None
    # A loss announced by a notice keeps its reason, whatever state the provider reports later.
    noticed = tpu_slice.loss or (_NOTICES[cloud.notice] if cloud.notice else None)
    loss = noticed or cloud.loss or (LossReason.BOOT_FAILED if booting else LossReason.HOST_LOST)
    match cloud.state:
        case CloudState.PREEMPTED:
            return release_slice(
                tpu_slice, LossReason.PREEMPTED, cloud.message or "preempted by the provider", now
            )
        case CloudState.FAILED | CloudState.STOPPING:
            return release_slice(
                tpu_slice, loss, cloud.message or f"provider state: {cloud.state}", now
            )
        case CloudState.REFUSED:
            refused = tpu_slice.loss or LossReason.REFUSED
            return release_slice(tpu_slice, refused, cloud.message or "out of capacity", now)
    if cloud.lost_hosts and not cloud.suspected:
        lost = ", ".join(str(index) for index in cloud.lost_hosts)
        reason = cloud.message or f"the provider lost host {lost}"
        return release_slice(tpu_slice, loss, reason, now)
    if cloud.state is CloudState.UP and tpu_slice.up_at is None:
        # What was said while it was created is over; its hosts report the rest.
        reason = "booting" if tpu_slice.state is SliceState.BOOTING else tpu_slice.reason
        tpu_slice = replace(tpu_slice, up_at=now, reason=reason)
    if cloud.notice:
        return apply_notice(tpu_slice, cloud.notice, now, cloud.message)
    if tpu_slice.state is SliceState.REQUESTED:
        return replace(tpu_slice, state=SliceState.BOOTING, reason=cloud.message or "booting")
    if booting and cloud.message and cloud.message != tpu_slice.reason:
        return replace(tpu_slice, reason=cloud.message)
    return tpu_slice


def apply_maintenance(tpu_slice: TpuSlice, cloud: CloudSlice) -> tuple[TpuSlice, str]:
    """Records when maintenance is planned; the message is empty when that is no news."""
    planned = cloud.maintenance_at
    if planned == tpu_slice.maintenance_at or not tpu_slice.live:
        return tpu_slice, ""
    if planned is None:
        message = "the planned maintenance was cancelled or is over"
    else:
        message = f"maintenance is planned for {planned:%Y-%m-%d %H:%M} UTC"
    shown = message if planned is not None and tpu_slice.state is SliceState.READY else None
    return replace(tpu_slice, maintenance_at=planned, reason=shown or tpu_slice.reason), message


def apply_end(tpu_slice: TpuSlice, cloud: CloudSlice, grace: timedelta, now: datetime) -> TpuSlice:
    """The slice as its known end comes near: a job that needs `grace` to save is stopped before. A
    short run is used for at least half of its time."""
    if not tpu_slice.live or cloud.ends_at is None:
        return tpu_slice
    if cloud.ends_at != tpu_slice.ends_at:
        tpu_slice = replace(tpu_slice, ends_at=cloud.ends_at)
    run = cloud.ends_at - (tpu_slice.up_at or tpu_slice.requested_at)
    if now < cloud.ends_at - min(grace + END_MARGIN, run / 2):
        return tpu_slice
    what = "its reservation" if tpu_slice.capacity is Capacity.RESERVED else "its run duration"
    message = f"{what} ends at {cloud.ends_at:%Y-%m-%d %H:%M} UTC"
    return apply_notice(tpu_slice, NoticeKind.PREEMPTED, now, message)


def apply_missing(tpu_slice: TpuSlice, now: datetime) -> TpuSlice:
    """The slice after a listing that was started after its request, and that lacks it."""
    match tpu_slice.state:
        case SliceState.GONE | SliceState.REQUESTED:
            return tpu_slice
        case SliceState.RELEASING if _may_still_run(tpu_slice, now):
            return tpu_slice
        case SliceState.RELEASING:
            return replace(tpu_slice, state=SliceState.GONE, gone_at=now)
        case _:
            # Spot machines are often deleted without notice.
            spot = tpu_slice.capacity is Capacity.SPOT or tpu_slice.state is SliceState.DOOMED
            return replace(
                tpu_slice,
                state=SliceState.GONE,
                loss=tpu_slice.loss or (LossReason.PREEMPTED if spot else LossReason.VANISHED),
                reason="no longer listed by the provider",
                lost_at=tpu_slice.lost_at or now,
                gone_at=now,
            )


def _may_still_run(tpu_slice: TpuSlice, now: datetime) -> bool:
    """An adopted node is not deleted: a job on it may run until its agents receive the stop, or
    stop it themselves because they cannot reach the server."""
    if not tpu_slice.adopted or tpu_slice.job_id is None or tpu_slice.fenced:
        return False
    return tpu_slice.lost_at is not None and now - tpu_slice.lost_at < AGENT_LEASE


def apply_notice(
    tpu_slice: TpuSlice, notice: NoticeKind, now: datetime, message: str = ""
) -> TpuSlice:
    """The slice after a notice: it still works, but not for long. A host may tell of it before the
    provider says why."""
    if tpu_slice.state is SliceState.DOOMED and message not in ("", tpu_slice.reason):
        return replace(tpu_slice, reason=message)
    if tpu_slice.state not in (SliceState.BOOTING, SliceState.READY):
        return tpu_slice
    return replace(
        tpu_slice,
        state=SliceState.DOOMED,
        loss=_NOTICES[notice],
        reason=message or f"notice: {notice}",
        lost_at=now,
    )
