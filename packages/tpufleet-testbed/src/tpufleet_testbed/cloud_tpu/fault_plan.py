"""Fault plans: which calls fail, when spot nodes are preempted, when zones close, and how much
capacity there is.

Seeded: the same plan and the same calls give the same faults.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.model.values import durations, encoding
from tpufleet_testbed.cloud_tpu import api_errors
from tpufleet_testbed.cloud_tpu.capacity import CapacityLimit
from tpufleet_testbed.cloud_tpu.locations import DurationRange, Latencies, Latency

DURATION_FIELDS = ("every", "after", "until")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFault:
    """A call that fails: the n-th one, with some probability, for some time, or always."""

    error: str  # a name in `api_errors.KINDS`, or "hang"
    method: str = "*"
    zone: str = "*"
    calls: tuple[int, ...] = ()  # numbered from 1 per method and zone; empty: any
    probability: float = 1.0
    after: timedelta = timedelta(0)  # since the emulator started
    until: timedelta | None = None
    late: bool = False  # the call succeeds and its operation fails

    def covers(self, method: str, zone: str, number: int, age: timedelta) -> bool:
        return (
            fnmatchcase(method, self.method)
            and fnmatchcase(zone, self.zone)
            and (not self.calls or number in self.calls)
            and self.after <= age
            and (self.until is None or age < self.until)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionStorm:
    """At regular intervals, each spot node is preempted with probability `share`."""

    every: timedelta
    share: float
    zone: str = "*"
    notice: bool = False  # send a notice first
    after: timedelta = timedelta(0)
    until: timedelta | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ZoneOutage:
    """A zone without capacity for some time, which preempts its spot nodes at the start."""

    zone: str
    after: timedelta = timedelta(0)
    until: timedelta | None = None
    takes: bool = True  # preempt spot nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudFaultPlan:
    seed: int = 0
    calls: tuple[CallFault, ...] = ()
    storms: tuple[PreemptionStorm, ...] = ()
    closings: tuple[ZoneOutage, ...] = ()
    stock: tuple[CapacityLimit, ...] = ()  # nodes
    quota: tuple[CapacityLimit, ...] = ()  # chips or cores
    latencies: Latencies = field(default_factory=Latencies)

    def __post_init__(self) -> None:
        for fault in self.calls:
            if fault.error not in (*api_errors.ERROR_KINDS, "hang"):
                known = ", ".join([*api_errors.ERROR_KINDS, "hang"])
                raise BadInput(f"unknown error {fault.error!r}; known are {known}")
            _check_share(fault.probability, "calls: probability")
        for storm in self.storms:
            _check_share(storm.share, "storms: share")
            if storm.every <= timedelta(0):
                raise BadInput("storms: every: must be above 0, such as 5m")

    def zone_closed(self, zone: str, age: timedelta) -> bool:
        """Whether the zone has no capacity at this time since the start."""
        return any(
            fnmatchcase(zone, outage.zone)
            and outage.after <= age
            and (outage.until is None or age < outage.until)
            for outage in self.closings
        )

    def draw(self, probability: float, key: str) -> bool:
        """A random draw that depends only on the seed and the key."""
        return random.Random(f"{self.seed}/{key}").random() < probability


def _check_share(share: float, field: str) -> None:
    if not 0 <= share <= 1:
        raise BadInput(f"{field}: {share:g} is not between 0 and 1")


NO_FAULTS = CloudFaultPlan()


def load(path: Path) -> CloudFaultPlan:
    """Read a plan from a YAML file. Durations are seconds, or strings such as 90s, 5m, 2h."""
    try:
        return parse(path.read_text())
    except (OSError, UnicodeDecodeError, BadInput) as error:
        raise BadInput(f"{path}: {error}") from error


def parse(text: str) -> CloudFaultPlan:
    import yaml

    try:
        document = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise BadInput(str(error)) from error
    if not isinstance(document, dict):
        raise BadInput(
            "not a mapping with seed, calls, storms, closings, stock, quota or latencies"
        )
    known = {item.name for item in fields(CloudFaultPlan)}
    for key in document:
        if key not in known:
            raise BadInput(f"{key}: unknown field; known are {', '.join(sorted(known))}")
    latencies = _latencies(document.pop("latencies", None) or {})
    plan = encoding.from_builtins(_with_durations(document), CloudFaultPlan)
    return replace(plan, latencies=latencies)


def _latencies(document: Any) -> Latencies:
    """Each a duration, or a range such as [30s, 2m]; the others keep their defaults."""
    known = {item.name for item in fields(Latencies)}
    if not isinstance(document, dict) or not set(document) <= known:
        raise BadInput(f"latencies: not a mapping of {', '.join(sorted(known))}")
    return Latencies(**{name: _latency(name, value) for name, value in document.items()})


def _latency(name: str, value: Any) -> Latency:
    try:
        if isinstance(value, list):
            shortest, longest = (durations.parse(each) or timedelta(0) for each in value)
            return DurationRange(shortest=shortest, longest=longest)
        return durations.parse(value) or timedelta(0)
    except (BadInput, ValueError) as error:
        raise BadInput(f"latencies: {name}: {error}") from error


def _with_durations(document: Any) -> Any:
    if isinstance(document, list):
        return [_with_durations(item) for item in document]
    if not isinstance(document, dict):
        return document
    return {
        key: durations.parse(value) if key in DURATION_FIELDS else _with_durations(value)
        for key, value in document.items()
    }


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
