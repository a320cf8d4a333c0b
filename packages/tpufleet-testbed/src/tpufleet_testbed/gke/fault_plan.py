"""Fault plans of the emulated GKE: what it has in stock, its quotas, and how slow it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tpufleet import schema
from tpufleet.model.tpu import tpu_types
from tpufleet.model.values import durations
from tpufleet.schema import Problem
from tpufleet_testbed import plan_files
from tpufleet_testbed.gke.node_pools import GkeEmulator

MACHINES = dict.fromkeys(row[5] for row in tpu_types.TYPES if row[5] is not None)
LABELS = [row[6] for row in tpu_types.GENERATIONS if row[6] is not None]

Count = Annotated[int, Meta(ge=0)]
ByKind = Mapping[Literal["spot", "on-demand", "reserved"], Count]


def _amounts(value: Any) -> Mapping[str, int]:
    """A number, or numbers by kind of capacity."""
    kind: Any = ByKind if isinstance(value, Mapping) else Count
    amount = schema.parse(kind, value)
    return amount if isinstance(amount, Mapping) else {"": amount}


Amounts = Annotated[Mapping[str, int], schema.custom("number", _amounts)]
Duration = Annotated[timedelta, durations.within()]
Zone = Annotated[str, schema.text("zone", r"[a-z]+-[a-z]+[0-9]+-[a-z]", example="us-central1-a")]
Region = Annotated[str, schema.text("region", r"[a-z]+-[a-z]+[0-9]+", example="us-central1")]
Machine = Annotated[str, plan_files.one_of("machine type", MACHINES)]
Label = Annotated[str, plan_files.one_of("accelerator", LABELS)]


class GkeFaultPlan(msgspec.Struct, frozen=True, kw_only=True):
    zones: tuple[Zone, ...] = ("us-central1-a",)  # for the provisioner, in order
    create: Duration = timedelta(seconds=5)
    delete: Duration = timedelta(seconds=5)
    chips: Duration = timedelta(0)  # from a ready node until its device plugin has them
    flex_start: Duration = timedelta(0)  # until a flex-start pool has its nodes
    operations: Count | None = None  # at the same time; None: no limit
    stock: Mapping[Zone, Mapping[Machine, Amounts]] = {}  # nodes
    quota: Mapping[Region, Mapping[Label, Amounts]] = {}  # chips

    def check(self) -> Iterator[Problem]:
        for zone in self.zones:
            if zone.rpartition("-")[0] != self.zones[0].rpartition("-")[0]:
                yield "zones", f"{self.zones[0]} and {zone} are not in one region"


def apply(plan: GkeFaultPlan, gke: GkeEmulator) -> None:
    """Operations in progress keep their duration."""
    gke.creation_time, gke.deletion_time = plan.create, plan.delete
    gke.device_plugin_delay, gke.flex_start_delay = plan.chips, plan.flex_start
    gke.max_operations = plan.operations
    gke.stock, gke.quotas = _limits(plan.stock), _limits(plan.quota)
    gke.zones = plan.zones


load = partial(plan_files.load, GkeFaultPlan)
parse = partial(plan_files.parse, GkeFaultPlan)


def _limits(
    places: Mapping[str, Mapping[str, Mapping[str, int]]],
) -> dict[tuple[str, ...], int]:
    """By (place, name), or (place, name, kind of capacity)."""
    return {
        tuple(filter(None, (place, name, kind))): number
        for place, by_name in places.items()
        for name, amounts in by_name.items()
        for kind, number in amounts.items()
    }
