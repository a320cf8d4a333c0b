"""Pools: named, bounded claims on capacity. And the memory of who refused what."""

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
    smallest: int = 0  # kept ready even when nobody needs them
    zones: tuple[str, ...] = ()
    capacity: tuple[Capacity, ...] = (Capacity.SPOT,)
    members: tuple[str, ...] = ()  # who may use it; empty: everybody
    slices_per_user: int | None = None
    supersede: bool = False  # a job of higher priority may take slices from a running one
    idle_after: timedelta = timedelta(minutes=10)  # idle slices above `smallest` are released


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityRefusal:
    """A provider would not give this kind of capacity here. Remembered, so that it is not asked
    again at once, nor for anything larger."""

    provider: str
    zone: str
    accelerator: str
    capacity: Capacity
    message: str
    refused_at: datetime
    until: datetime  # do not ask before
    streak: int = 1  # refusals in a row; 0: it has been granted since
    permanent: bool = False  # asking again will fail until somebody changes something

    @property
    def key(self) -> str:
        return f"{self.provider}|{self.zone}|{self.accelerator}|{self.capacity}"
