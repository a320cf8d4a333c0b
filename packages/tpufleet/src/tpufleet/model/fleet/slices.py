"""Slices: units of TPU capacity that are granted and lost as a whole."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NewType

from tpufleet.model.job.jobs import Capacity, JobId
from tpufleet.model.values import encoding

SliceId = NewType("SliceId", str)  # also the name in the cloud, chosen before the request


# Providers whose slices are processes without TPUs.
SIMULATED_PROVIDERS = frozenset({"local"})
# Reason of a new job that will run on them.
SIMULATED = "simulated on the server's machine, without TPUs"
# Providers that can take over a node that a person made.
ADOPTING_PROVIDERS = frozenset({"tpu-vm", "compute"})


def source_text(provider: str, zone: str, capacity: Capacity) -> str:
    """`us-central1-a (spot)`; a simulated slice is never shown as a real one."""
    kind = f"{capacity}, simulated" if provider in SIMULATED_PROVIDERS else str(capacity)
    return f"{zone} ({kind})"


def settings_digest(*values: object) -> str:
    """The same for equal values, whatever the order of their keys."""
    text = json.dumps(encoding.to_builtins(values), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class SliceState(StrEnum):
    REQUESTED = "requested"  # recorded; the provider may not know it yet
    BOOTING = "booting"  # the provider has it; not all agents have checked in
    READY = "ready"  # all agents have checked in
    DOOMED = "doomed"  # draining: a notice announced its loss, but it still works
    RELEASING = "releasing"  # to be deleted; the provider may not have done so yet
    GONE = "gone"  # the provider no longer has it


class LossReason(StrEnum):
    """Why a slice was lost or released."""

    PREEMPTED = "preempted"
    MAINTENANCE = "maintenance"
    HOST_LOST = "host_lost"
    OUT_OF_MEMORY = "out_of_memory"  # the provider killed a host over its memory limit
    BOOT_FAILED = "boot_failed"
    REFUSED = "refused"  # the provider refused to create it
    RELEASED = "released"  # no longer needed
    VANISHED = "vanished"  # no longer listed by the provider, without a reason


@dataclass(frozen=True, kw_only=True, slots=True)
class TpuSlice:
    id: SliceId
    provider: str
    accelerator: str
    zone: str
    capacity: Capacity
    request_group: str  # slices of one group are requested together
    requested_at: datetime
    pool: str | None = None
    job_id: JobId | None = None  # the job it is held for
    assigned_at: datetime | None = None  # to that job
    state: SliceState = SliceState.REQUESTED
    reason: str = ""
    loss: LossReason | None = None
    up_at: datetime | None = None  # the provider reported that its machines run: billing starts
    ready_at: datetime | None = None
    idle_since: datetime | None = None
    silent_since: datetime | None = None  # a host that was up reports no more, and may come back
    fenced_at: datetime | None = None  # the provider reported that its machines no longer run
    lost_at: datetime | None = None  # when the loss was detected, or it was released
    gone_at: datetime | None = None
    maintenance_at: datetime | None = None  # of its machines, as the provider announced it
    ends_at: datetime | None = None  # the cloud deletes its machines then
    reserved_for: str | None = None  # after a failure, its owner can look at it before it is reused
    reserved_until: datetime | None = None
    last_owner: str | None = None  # of the job that gave it back to its pool
    last_failed: bool = False  # whether that job failed
    node: str = ""  # made by a person, and adopted: its name in the cloud; never deleted
    # Digest of the settings that it was requested with, besides its type and source: see
    # `Provider.slice_settings`. Empty: not recorded.
    settings: str = ""

    @property
    def adopted(self) -> bool:
        return bool(self.node)

    def is_reserved(self, now: datetime) -> bool:
        return self.reserved_until is not None and now < self.reserved_until

    @property
    def fenced(self) -> bool:
        """No process can run on it any more."""
        return self.state is SliceState.GONE or self.fenced_at is not None

    @property
    def gone_since(self) -> datetime | None:
        if self.state is not SliceState.GONE:
            return None
        return self.gone_at or self.lost_at or self.requested_at

    @property
    def live(self) -> bool:
        """Usable, or may become so."""
        return self.state in LIVE_STATES


LIVE_STATES = frozenset(
    {SliceState.REQUESTED, SliceState.BOOTING, SliceState.READY, SliceState.DOOMED}
)
