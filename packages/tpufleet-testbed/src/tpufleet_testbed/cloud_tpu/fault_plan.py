"""Fault plans: which calls fail, when spot nodes are preempted, when zones close, and how much
capacity there is.

Seeded: the same plan and the same calls give the same faults.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tpufleet import schema
from tpufleet.model.values import durations
from tpufleet_testbed import plan_files
from tpufleet_testbed.cloud_tpu import api_errors
from tpufleet_testbed.cloud_tpu.capacity import CapacityLimit
from tpufleet_testbed.cloud_tpu.locations import DurationRange, Latencies, Latency


def _latency(value: Any) -> Latency:
    """A duration, or a range such as [30s, 2m]."""
    if not isinstance(value, list):
        return schema.parse(Duration, value)
    shortest, longest = schema.parse(Range, value)
    return DurationRange(shortest=shortest, longest=longest)


def _latencies(value: Any) -> Latencies:
    return Latencies(**schema.parse(LatencyByOperation, value))


Share = Annotated[float, Meta(ge=0, le=1)]
Duration: Any = Annotated[timedelta, durations.within()]
Range: Any = Annotated[tuple[Duration, ...], Meta(min_length=2, max_length=2)]
LatencyByOperation: Any = Mapping[
    Annotated[str, plan_files.one_of("operation", [item.name for item in fields(Latencies)])],
    Annotated[Latency, schema.custom("duration or range", _latency)],
]
ErrorName = Annotated[str, plan_files.one_of("error", [*api_errors.ERROR_KINDS, "hang"])]


class TimeWindow(msgspec.Struct, frozen=True, kw_only=True):
    after: Duration = timedelta(0)  # since the emulator started
    until: Duration | None = None

    def contains(self, age: timedelta) -> bool:
        return self.after <= age and (self.until is None or age < self.until)


class CallFault(TimeWindow, frozen=True, kw_only=True):
    """A call that fails: the n-th one, with some probability, for some time, or always."""

    error: ErrorName
    method: str = "*"
    zone: str = "*"
    calls: tuple[int, ...] = ()  # numbered from 1 per method and zone; empty: any
    probability: Share = 1.0
    late: bool = False  # the call succeeds and its operation fails

    def covers(self, method: str, zone: str, number: int, age: timedelta) -> bool:
        return (
            fnmatchcase(method, self.method)
            and fnmatchcase(zone, self.zone)
            and (not self.calls or number in self.calls)
            and self.contains(age)
        )


class PreemptionStorm(TimeWindow, frozen=True, kw_only=True):
    """At regular intervals, each spot node is preempted with probability `share`."""

    every: Annotated[timedelta, durations.within(least=1)]
    share: Share
    zone: str = "*"
    notice: bool = False  # send a notice first


class ZoneOutage(TimeWindow, frozen=True, kw_only=True):
    """A zone without capacity for some time, which preempts its spot nodes at the start."""

    zone: str
    takes: bool = True  # preempt spot nodes


class CloudFaultPlan(msgspec.Struct, frozen=True, kw_only=True):
    seed: int = 0
    calls: tuple[CallFault, ...] = ()
    storms: tuple[PreemptionStorm, ...] = ()
    closings: tuple[ZoneOutage, ...] = ()
    stock: tuple[CapacityLimit, ...] = ()  # nodes
    quota: tuple[CapacityLimit, ...] = ()  # chips or cores
    latencies: Annotated[Latencies, schema.custom("latencies", _latencies)] = Latencies()

    def zone_closed(self, zone: str, age: timedelta) -> bool:
        """Whether the zone has no capacity at this time since the start."""
        return any(
            fnmatchcase(zone, outage.zone) and outage.contains(age) for outage in self.closings
        )

    def draw(self, probability: float, key: str) -> bool:
        """A random draw that depends only on the seed and the key."""
        return random.Random(f"{self.seed}/{key}").random() < probability


NO_FAULTS = CloudFaultPlan()


load = partial(plan_files.load, CloudFaultPlan)
parse = partial(plan_files.parse, CloudFaultPlan)


@dataclass(slots=True)
class CallFaults:
    """Counts calls and matches them against a plan."""

    plan: CloudFaultPlan
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def match(self, method: str, zone: str, age: timedelta) -> CallFault | None:
        """The fault for this call, if any."""
        self._counts[method, zone] += 1
        number = self._counts[method, zone]
        for index, fault in enumerate(self.plan.calls):
            if fault.covers(method, zone, number, age) and self.plan.draw(
                fault.probability, f"call/{index}/{method}/{zone}/{number}"
            ):
                return fault
        return None
