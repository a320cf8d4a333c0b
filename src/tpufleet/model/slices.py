"""Slices: units of TPU that are granted and lost as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NewType

from tpufleet.model.jobs import Capacity, JobId

SliceId = NewType("SliceId", str)  # the name in the cloud, chosen before the cloud is asked


class SliceState(StrEnum):
    REQUESTED = "requested"  # recorded; the provider may or may not have heard of it
    BOOTING = "booting"  # the provider has it; not every agent has checked in
    READY = "ready"  # every host's agent has checked in
    DOOMED = "doomed"  # a notice came; it still works for a short while
    RELEASING = "releasing"  # to be deleted; the provider may or may not have done so
    GONE = "gone"  # the provider no longer has it


class LossReason(StrEnum):
    """Why we lost, or gave up, a slice."""

    PREEMPTED = "preempted"
    MAINTENANCE = "maintenance"
    HOST_LOST = "host_lost"
    OUT_OF_MEMORY = "out_of_memory"  # the provider ended a host that used more than it may
    BOOT_FAILED = "boot_failed"
    REFUSED = "refused"  # the provider would not create it
    RELEASED = "released"  # no longer needed
    VANISHED = "vanished"  # the provider no longer lists it and gave no reason


@dataclass(frozen=True, kw_only=True, slots=True)
class TpuSlice:
    id: SliceId
    provider: str
    accelerator: str
    zone: str
    capacity: Capacity
    request_group: str  # slices of one order are asked for together
    requested_at: datetime
    pool: str | None = None
    job_id: JobId | None = None  # the job it is held for
    state: SliceState = SliceState.REQUESTED
    reason: str = ""
    loss: LossReason | None = None
    up_at: datetime | None = None  # the provider said that its machines run: they are paid for
    ready_at: datetime | None = None
    idle_since: datetime | None = None
    lost_at: datetime | None = None  # when we knew that it was lost or gave it up
    gone_at: datetime | None = None

    @property
    def live(self) -> bool:
        """It is, or may become, useful."""
        return self.state in LIVE_STATES


LIVE_STATES = frozenset(
    {SliceState.REQUESTED, SliceState.BOOTING, SliceState.READY, SliceState.DOOMED}
)
