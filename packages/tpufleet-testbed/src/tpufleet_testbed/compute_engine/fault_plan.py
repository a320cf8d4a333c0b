"""Fault plans of the emulated Compute Engine, and its switches: answers that no document gives, so
that a client can be tested with each of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tpufleet import schema
from tpufleet_testbed import latencies, plan_files
from tpufleet_testbed.compute_engine import api_errors, catalog
from tpufleet_testbed.faults import Duration, FailingCall, PreemptionStorm, Share, ZoneOutage
from tpufleet_testbed.latencies import Latency, LatencyTable, seconds

Model = Literal["STANDARD", "SPOT", "FLEX_START", "RESERVATION_BOUND"]
# `hang`: no answer. `lost-answer`: the call takes effect, and 503 is the answer. `omitted` and
# `stale`: of listings, which succeed and lack everything, or answer as they did before.
# `unreachable`: listings have a warning in place of their items, aggregated ones of the zone.
SPECIAL = ("hang", "lost-answer", "omitted", "stale", "unreachable")
_ERRORS = [*api_errors.CALLS, *SPECIAL, *api_errors.OPERATIONS]


class ComputeCallFault(FailingCall, frozen=True, kw_only=True):
    """`method` is such as instanceGroupManagers.insert; `late` needs an error of operations."""

    error: Annotated[str, plan_files.one_of("error", _ERRORS)]


class StockLimit(msgspec.Struct, frozen=True, kw_only=True):
    """At most `most` matching VMs. Patterns may contain * and ?."""

    most: Annotated[int, Meta(ge=0)]
    zone: str = "*"
    machine: str = "*"
    model: str = "*"

    def covers(self, zone: str, machine: str, model: str) -> bool:
        return (
            fnmatchcase(zone, self.zone)
            and fnmatchcase(machine, self.machine)
            and fnmatchcase(model, self.model)
        )


class QuotaLimit(msgspec.Struct, frozen=True, kw_only=True):
    """At most `most` chips of a TPU family in a region."""

    most: Annotated[int, Meta(ge=0)]
    region: str = "*"
    family: str = "*"  # CT6E
    kind: Literal["standard", "preemptible", "*"] = "*"

    def covers(self, region: str, family: str, kind: str) -> bool:
        return (
            fnmatchcase(region, self.region)
            and fnmatchcase(family.upper(), self.family.upper())
            and self.kind in ("*", kind)
        )


class ReservedCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """A reservation that exists from the start, or starts later. One that ends is of calendar
    mode."""

    name: str
    zone: str
    machine: Annotated[str, plan_files.one_of("machine type", list(catalog.machines()))]
    vms: Annotated[int, Meta(ge=1)]
    after: Duration = timedelta(0)
    until: Duration | None = None


class Switches(msgspec.Struct, frozen=True, kw_only=True):
    """Answers that no source gives: see the open questions of docs/testbed.md."""

    # Models that bulk mode takes; documents disagree.
    bulk_models: tuple[Model, ...] = ("STANDARD", "SPOT", "FLEX_START", "RESERVATION_BOUND")
    # When another model is refused: by the call, or by the checks for capacity.
    bulk_refusal: Literal["call", "check"] = "call"
    # Whether a topology requires bulk mode: a guide of 2026-04 has one without it, and three months
    # later that was refused.
    topology_needs_bulk: bool = True
    # Whether VMs that are bound to it can use a reservation that is not of calendar mode: the page
    # of TPUs shows no other model, that of the model excludes it.
    bound_to_any_reservation: bool = True
    # When a topology that the machine type cannot have, or that does not match the target size, is
    # refused: by the insert of the group, or later for each VM. One that no machine type can have:
    # also by the insert of the policy.
    bad_topology: Literal["policy", "call", "vm"] = "vm"
    # When a template of TPUs without TERMINATE, or of flex-start without a run time, is refused.
    bad_scheduling: Literal["call", "vm"] = "call"
    # When want of quota is answered, for a single VM: by the call, or by its operation.
    quota_refusal: Literal["call", "operation"] = "operation"
    topology_after_loss: Literal["INCOMPLETE", "FAILED", "ACTIVE"] = "INCOMPLETE"
    stable_after_loss: bool = True
    # After a lost VM is back: the slice works again, or all of it has to be created again.
    topology_recovers: bool = True
    topology_returning: Literal["REACTIVATING", "INCOMPLETE"] = "REACTIVATING"  # until then
    resize_again: bool = True  # a group whose size is 0 may get VMs again
    worker_order: Literal["shuffled", "name"] = "shuffled"
    metadata: Literal["boot", "topology"] = "boot"  # when the attributes of the slice are there
    waiting_limit: Duration | None = None  # a bulk group gives up; documents have no such limit
    regional_zone_search: bool = True  # a regional group takes any zone with capacity
    flex_failure: Literal["stockout", "internal"] = "stockout"  # of a VM that must not wait
    page_size: Annotated[int, Meta(ge=1)] = catalog.LIMITS["page_size"]  # the most items of a page


# First-hand reports: two minutes to a VM, seven to a slice of two hosts; up to 12 minutes in
# STAGING before a failure.
_OPERATION = seconds(1, 5)
_CHECK = seconds(10, 30)
_PROVISION = seconds(5, 20)
_BOOT = seconds(40, 120)
_LINK = seconds(20, 90)
_UNLINK = seconds(5, 30)
_STOP = seconds(10, 40)
_DELETION = seconds(20, 90)
_STOCKOUT = seconds(5, 15)
_REPAIR = seconds(60, 180)
_MAINTENANCE = seconds(600, 3600)
_RESERVATION = seconds(10, 120)  # assumed


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeLatencies(LatencyTable):
    """How long things take."""

    operation: Latency = _OPERATION  # of policies, templates and groups
    check: Latency = _CHECK  # between looks for capacity
    provision: Latency = _PROVISION  # from a grant to STAGING
    boot: Latency = _BOOT  # from STAGING to RUNNING
    link: Latency = _LINK  # from all VMs RUNNING to an active topology
    unlink: Latency = _UNLINK
    stop: Latency = _STOP
    deletion: Latency = _DELETION
    stockout: Latency = _STOCKOUT  # until the operation of a VM fails
    flex_failure: Latency = timedelta(minutes=12)
    repair: Latency = _REPAIR  # from a host error to STAGING
    notice_period: Latency = timedelta(seconds=30)
    maintenance: Latency = _MAINTENANCE
    reservation: Latency = _RESERVATION  # from the start of one of calendar mode until it exists


IMMEDIATE = ComputeLatencies(
    **{name: timedelta(0) for name in (
        "operation", "provision", "boot", "link", "unlink", "stop", "deletion", "stockout",
        "repair", "maintenance", "reservation",
    )},
    check=timedelta(seconds=1),
)  # fmt: skip


class ComputeFaultPlan(msgspec.Struct, frozen=True, kw_only=True):
    seed: int = 0
    calls: tuple[ComputeCallFault, ...] = ()
    storms: tuple[PreemptionStorm, ...] = ()
    closings: tuple[ZoneOutage, ...] = ()
    # Reads of a region, and writes, are limited to this many in each minute of the clock
    # (cloud.google.com/compute/api-quota, where 1,500 is usual).
    calls_per_minute: Annotated[int, Meta(ge=1)] | None = None
    stock: tuple[StockLimit, ...] = ()  # VMs
    quota: tuple[QuotaLimit, ...] = ()  # chips
    reservations: tuple[ReservedCapacity, ...] = ()
    failing_topologies: Share = 0.0  # of slices whose VMs all run
    latencies: Annotated[
        ComputeLatencies, schema.custom("latencies", latencies.parser(ComputeLatencies))
    ] = ComputeLatencies()
    switches: Switches = Switches()


NO_FAULTS = ComputeFaultPlan()
load = partial(plan_files.load, ComputeFaultPlan)
parse = partial(plan_files.parse, ComputeFaultPlan)
