"""Fault plans: which calls fail, when spot nodes are preempted, when zones close, and how much
capacity there is."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Annotated

import msgspec

from tpufleet import schema
from tpufleet_testbed import faults, latencies, plan_files
from tpufleet_testbed.cloud_tpu import api_errors
from tpufleet_testbed.cloud_tpu.capacity import CapacityLimit
from tpufleet_testbed.cloud_tpu.locations import Latencies
from tpufleet_testbed.compute_engine.fault_plan import ComputeFaultPlan
from tpufleet_testbed.faults import CallFaults as CallFaults
from tpufleet_testbed.faults import FailingCall, PreemptionStorm, ZoneOutage

ErrorName = Annotated[str, plan_files.one_of("error", [*api_errors.ERROR_KINDS, "hang"])]


class CallFault(FailingCall, frozen=True, kw_only=True):
    error: ErrorName


class CloudFaultPlan(msgspec.Struct, frozen=True, kw_only=True):
    seed: int = 0
    compute: ComputeFaultPlan = ComputeFaultPlan()  # of Compute Engine
    calls: tuple[CallFault, ...] = ()
    storms: tuple[PreemptionStorm, ...] = ()
    closings: tuple[ZoneOutage, ...] = ()
    stock: tuple[CapacityLimit, ...] = ()  # nodes
    quota: tuple[CapacityLimit, ...] = ()  # chips or cores
    latencies: Annotated[Latencies, schema.custom("latencies", latencies.parser(Latencies))] = (
        Latencies()
    )

    def zone_closed(self, zone: str, age: timedelta) -> bool:
        return faults.zone_closed(self.closings, zone, age)


NO_FAULTS = CloudFaultPlan()
load = partial(plan_files.load, CloudFaultPlan)
parse = partial(plan_files.parse, CloudFaultPlan)
