"""The provider interface: create, list and delete slices.

Every call returns at once. Requests and releases are idempotent; listing changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Protocol

import msgspec

from tpufleet.errors import BadInput, BadRequest, NoCapacity, not_found
from tpufleet.model.fleet.cloud_slices import CloudSlice, ExpectedSlice
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.job.pod_settings import PodSettings
from tpufleet.model.tpu import type_lookup
from tpufleet.model.tpu.type_lookup import Accelerator, short_name


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Slices requested together, all or nothing, under names chosen by the caller."""

    id: str
    slices: tuple[SliceId, ...]
    accelerator: str
    zone: str
    capacity: Capacity
    tokens: dict[SliceId, str]  # bootstrap tokens of the agents, by slice
    server_url: str
    fleet: str  # label value that marks the slices of this installation
    ca_certificates: str = ""  # PEM; what agents trust besides the system's, for `server_url`
    job_id: str | None = None
    pool: str | None = None
    owner: str = ""  # of the job
    priority: int = 0  # the job's, for providers with their own queue
    grace: timedelta = timedelta(seconds=30)  # the job's, between SIGTERM and SIGKILL
    mounts: tuple[str, ...] = ()  # folders of the job's buckets
    labels: dict[str, str] = {}  # copied where the provider has labels
    pod: PodSettings = msgspec.field(default_factory=PodSettings)  # the job's, on Kubernetes
    node: str = ""  # adopt this node, which a person made, as the only slice; create nothing


def out_of_capacity(accelerator: str, capacity: str, zone: str, detail: str = "") -> NoCapacity:
    message = f"{short_name(accelerator)} ({capacity}) is out of capacity in {zone}"
    return NoCapacity(f"{message}: {detail}" if detail else message)


def no_such_slice(slice_id: SliceId) -> BadRequest:
    return BadRequest(str(not_found("slice", slice_id, "inventory slices")))


def find_type(accelerator: str) -> Accelerator:
    """BadRequest for an unknown type."""
    try:
        return type_lookup.find(accelerator)
    except BadInput as error:
        raise BadRequest(str(error)) from error


def require_zone(zone: str, configured: Sequence[str], setting: str) -> None:
    if zone not in configured:
        known = ", ".join(configured)
        raise BadRequest(f"zone {zone} is not configured (zones: {known}); add it to {setting}")


def no_capacity_within(age: timedelta) -> str:
    return f"no capacity within {int(age.total_seconds())} s"


RUN_ENDED = "the run duration of flex-start is over"
RESERVATION_ENDED = "the reservation ended"


def refuse_adoption(order: Order, provider: str) -> None:
    """For providers without nodes that people make."""
    if order.node:
        raise BadRequest(f"the provider {provider} cannot adopt TPU VMs")


class Fault(StrEnum):
    """Faults that a provider can inject into a slice."""

    PREEMPT = "preempt"  # without notice
    PREEMPT_NOTICE = "preempt-notice"  # notice, then preemption
    MAINTENANCE = "maintenance"
    KILL_HOST = "kill-host"
    STALL_HOST = "stall-host"  # the host stops answering, without dying


class Provider(Protocol):
    name: str
    zones: Sequence[str]  # used when a job names none
    # Whether a workload could read the tokens on its host. Then a token is valid once: the agent
    # exchanges it for the slice's own token.
    exposes_tokens: bool

    def slice_settings(self, accelerator: str, pod: PodSettings) -> str:
        """Digest of what decides how a slice of a pool is created, besides its type, zone and
        capacity. When it changes, idle slices are replaced. Empty: nothing does."""
        ...

    def request(self, order: Order) -> None:
        """Start creating, or adopting `order.node`; BadRequest if the provider cannot adopt. Raises
        a ProviderError, whose type tells whether a retry would help."""
        ...

    def release(self, slice_id: SliceId, zone: str) -> None:
        """Start deleting. Succeeds if it does not exist. An adopted node is given back to whoever
        made it, and never deleted."""
        ...

    def listing(self, expected: Collection[ExpectedSlice] = ()) -> Sequence[CloudSlice]:
        """Every slice with our fleet label. A slice not in it does not exist: where the cloud's
        listing is only eventually consistent, those of `expected` that it lacks are looked up."""
        ...

    def inject(self, slice_id: SliceId, fault: Fault, host_index: int | None = None) -> None:
        """Inject a fault. BadRequest if the provider does not support it."""
        ...

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` when the listing may have changed; never, if the provider cannot tell."""
        ...

    def close(self) -> None: ...
