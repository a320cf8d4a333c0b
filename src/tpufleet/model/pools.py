"""Pools: named, bounded claims on capacity. And refusals of capacity."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from tpufleet.model.jobs import Capacity


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    name: str
    provider: str
    accelerator: str
    largest: int  # most slices at a time
    smallest: int = 0  # kept ready even when no job needs them
    zones: tuple[str, ...] = ()
    capacity: tuple[Capacity, ...] = (Capacity.SPOT,)
    members: tuple[str, ...] = ()  # users that may use it; empty: all
    slices_per_user: int | None = None
    supersede: bool = False  # a job of higher priority may take slices from a running one
    idle_after: timedelta = timedelta(minutes=10)  # idle slices above `smallest` are released


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityRefusal:
    """A provider refused this type from this source. Until it expires, neither this nor a larger
    size is requested there."""

    provider: str
    zone: str
    accelerator: str
    capacity: Capacity
    message: str
    refused_at: datetime
    until: datetime  # no request before
    streak: int = 1  # consecutive refusals; 0: granted since
    permanent: bool = False  # a permission or setting has to change first

    @property
    def key(self) -> str:
        return f"{self.provider}|{self.zone}|{self.accelerator}|{self.capacity}"
