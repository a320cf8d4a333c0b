"""What a provider is: it starts creating slices, lists them, and deletes them.

Every call returns at once. Asking twice for the same slice is one slice; releasing a slice
already gone is success; listing changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Protocol

from tpufleet.model.cloud_slices import CloudSlice, CloudState
from tpufleet.model.jobs import Capacity
from tpufleet.model.slices import SliceId


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Slices that are asked for together, all or nothing, under names that we chose."""

    id: str
    slices: tuple[SliceId, ...]
    accelerator: str
    zone: str
    capacity: Capacity
    tokens: dict[SliceId, str]  # what the agents of each slice come with
    server_url: str
    fleet: str  # label that marks slices as ours
    job_id: str | None = None
    pool: str | None = None
    priority: int = 0  # the job's, for sources that queue by themselves
    grace: timedelta = timedelta(seconds=30)  # the job's, between SIGTERM and SIGKILL
    labels: dict[str, str] = field(default_factory=dict)  # shown where a source shows labels


__all__ = ["CloudSlice", "CloudState", "Fault", "Order", "Provider"]


class Fault(StrEnum):
    """What a provider that can be drilled does to a slice on command."""

    PREEMPT = "preempt"  # without notice
    PREEMPT_NOTICE = "preempt-notice"  # notice, then taken
    MAINTENANCE = "maintenance"
    KILL_HOST = "kill-host"
    STALL_HOST = "stall-host"  # the host stops answering, without dying


class Provider(Protocol):
    name: str
    zones: Sequence[str]  # where it looks when a job names none
    # Whether a workload could read the tokens that it hands to hosts. Then they only let an agent
    # in, once; it gets the slice's own token from the control plane.
    exposes_tokens: bool

    def request(self, order: Order) -> None:
        """Start creating. Raises a ProviderError that says whether to wait or to give up."""
        ...

    def release(self, slice_id: SliceId, zone: str) -> None:
        """Start deleting. Success when it is already gone."""
        ...

    def listing(self) -> Sequence[CloudSlice]:
        """Every slice with our fleet label. A slice not in it does not exist."""
        ...

    def inject(self, slice_id: SliceId, fault: Fault, host_index: int | None = None) -> None:
        """Hurt a slice on purpose. BadRequest where the provider cannot."""
        ...

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` when the listing may have changed; never call it if that is unknown."""
        ...

    def close(self) -> None: ...
