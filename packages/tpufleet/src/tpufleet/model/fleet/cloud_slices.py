"""Slices as a provider lists them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum

import msgspec

from tpufleet.model.fleet.bootstrap import BootstrapReport
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.pools import RefusalKind
from tpufleet.model.fleet.slices import LossReason, SliceId
from tpufleet.model.job.jobs import Capacity


class CloudState(StrEnum):
    PENDING = "pending"  # accepted; no machine yet
    CREATING = "creating"
    UP = "up"  # machines run; agents may still be booting
    STOPPING = "stopping"  # being deleted
    PREEMPTED = "preempted"  # preempted; may still have to be deleted
    FAILED = "failed"  # cannot come up; has to be deleted
    REFUSED = "refused"  # see `refusal`; may still have to be deleted


class CloudSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A slice in a provider's listing."""

    id: SliceId
    zone: str
    state: CloudState
    message: str = ""  # the provider's explanation, if any
    detail: str = ""  # its whole text, where the message is a summary
    lost_hosts: tuple[int, ...] = ()  # hosts that the provider reports as lost
    suspected: bool = False  # `lost_hosts` are only suspected: their agents decide
    notice: NoticeKind | None = None
    fenced: bool = False  # its machines no longer run; it may still have to be deleted
    loss: LossReason | None = None  # where the provider knows more than the state says
    refusal: RefusalKind = RefusalKind.CAPACITY  # why, if the state is REFUSED
    maintenance_at: datetime | None = None  # announced, not begun
    ends_at: datetime | None = None  # its machines are deleted then, by its reservation or run time
    capacity: Capacity | None = None  # of an adopted node; else the one that was requested
    bootstrap: tuple[BootstrapReport, ...] = ()  # of hosts whose agents have not connected

    @property
    def healthy(self) -> bool:
        expected_up = self.state in (CloudState.PENDING, CloudState.CREATING, CloudState.UP)
        return expected_up and not self.lost_hosts and self.notice is None


class ExpectedSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A slice that is recorded as existing."""

    id: SliceId
    zone: str
    node: str = ""  # the one that it was adopted from


class SliceListing(tuple[CloudSlice, ...]):
    """Every slice of a provider, except in zones that did not respond: a slice that is missing
    there may exist."""

    zone_errors: Mapping[str, str]  # by zone that did not respond

    def __new__(
        cls, slices: Iterable[CloudSlice], zone_errors: Mapping[str, str] | None = None
    ) -> SliceListing:
        listing = super().__new__(cls, tuple(slices))
        listing.zone_errors = dict(zone_errors or {})
        return listing

    @property
    def unreachable_zones(self) -> frozenset[str]:
        return frozenset(self.zone_errors)
