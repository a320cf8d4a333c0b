"""A slice as its provider sees it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tpufleet.model.hosts import NoticeKind
from tpufleet.model.slices import LossReason, SliceId


class CloudState(StrEnum):
    PENDING = "pending"  # accepted, no machine yet
    CREATING = "creating"
    UP = "up"  # machines run; agents may still be booting
    STOPPING = "stopping"  # on its way out
    PREEMPTED = "preempted"  # taken; may still have to be deleted
    FAILED = "failed"  # will never come up; has to be deleted
    REFUSED = "refused"  # no stock or quota; nothing exists, or has to be deleted


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudSlice:
    """A slice as the provider sees it now."""

    id: SliceId
    zone: str
    state: CloudState
    message: str = ""  # the provider's own reason, where it gave one
    lost_hosts: tuple[int, ...] = ()  # hosts that the provider knows to be dead
    notice: NoticeKind | None = None
    loss: LossReason | None = None  # where the provider knows better than its state tells

    @property
    def healthy(self) -> bool:
        coming = self.state in (CloudState.PENDING, CloudState.CREATING, CloudState.UP)
        return coming and not self.lost_hosts and self.notice is None


class SliceListing(tuple[CloudSlice, ...]):
    """Every slice that a provider has, but for zones that did not answer: of those nothing is
    known, and a slice that is missing there may well exist."""

    unreachable_zones: frozenset[str]

    def __new__(
        cls, slices: Iterable[CloudSlice], unreachable_zones: Iterable[str] = ()
    ) -> SliceListing:
        made = super().__new__(cls, tuple(slices))
        made.unreachable_zones = frozenset(unreachable_zones)
        return made
