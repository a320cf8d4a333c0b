"""What goes wrong, and when: calls that fail, storms that take nodes, zones that close; and how
much there is to be had at all.

Seeded: the same plan and the same calls give the same trouble.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, fields
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.model import durations, encoding
from tpufleet.testbed.cloud_tpu import api_errors
from tpufleet.testbed.cloud_tpu.capacity import CapacityLimit

SPANS = ("every", "after", "until")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFault:
    """A call that fails: on its n-th time, by chance, in a span of time, or always."""

    error: str  # a name in `api_errors.KINDS`, or "hang"
    method: str = "*"
    zone: str = "*"
    calls: tuple[int, ...] = ()  # from 1, counted by method and zone; empty: any
    probability: float = 1.0
    after: timedelta = timedelta(0)  # since the emulator began
    until: timedelta | None = None
    late: bool = False  # the call is taken, and its operation fails

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
    """Every so often, each spot node is taken with this chance."""

    every: timedelta
    share: float
    zone: str = "*"
    notice: bool = False  # with a notice first
    after: timedelta = timedelta(0)
    until: timedelta | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ZoneOutage:
    """A zone that has nothing to give for a while, and takes back what is spot."""

    zone: str
    after: timedelta = timedelta(0)
    until: timedelta | None = None
    takes: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    seed: int = 0
    calls: tuple[CallFault, ...] = ()
    storms: tuple[PreemptionStorm, ...] = ()
    closings: tuple[ZoneOutage, ...] = ()
    stock: tuple[CapacityLimit, ...] = ()  # nodes that there are to be had
    quota: tuple[CapacityLimit, ...] = ()  # chips that the project may hold

    def __post_init__(self) -> None:
        for fault in self.calls:
            if fault.error not in (*api_errors.ERROR_KINDS, "hang"):
                known = ", ".join([*api_errors.ERROR_KINDS, "hang"])
                raise BadInput(f"no error is called {fault.error!r}; there are {known}")
            _check_share(fault.probability, "calls: probability")
        for storm in self.storms:
            _check_share(storm.share, "storms: share")
            if storm.every <= timedelta(0):
                raise BadInput("storms: every: a time above 0 is needed, 5m say")


def _check_share(share: float, what: str) -> None:
    if not 0 <= share <= 1:
        raise BadInput(f"{what}: {share:g} is not between 0 and 1")


NO_FAULTS = FaultPlan()


def load(path: Path) -> FaultPlan:
    """A plan from a YAML file. Spans are seconds, or read like 90s, 5m, 2h."""
    try:
        return parse(path.read_text())
    except (OSError, UnicodeDecodeError, BadInput) as error:
        raise BadInput(f"{path}: {error}") from error


def parse(text: str) -> FaultPlan:
    import yaml

    try:
        written = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise BadInput(str(error)) from error
    if not isinstance(written, dict):
        raise BadInput("a mapping is needed, with seed, calls, storms, closings, stock or quota")
    known = {item.name for item in fields(FaultPlan)}
    for key in written:
        if key not in known:
            raise BadInput(f"{key}: unknown field; there are {', '.join(sorted(known))}")
    return encoding.from_builtins(_with_spans(written), FaultPlan)


def _with_spans(written: Any) -> Any:
    if isinstance(written, list):
        return [_with_spans(item) for item in written]
    if not isinstance(written, dict):
        return written
    return {
        key: durations.parse(value) if key in SPANS else _with_spans(value)
        for key, value in written.items()
    }


@dataclass(slots=True)
class CallFaults:
    """A plan at work: it counts calls."""

    plan: FaultPlan
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def match(self, method: str, zone: str, age: timedelta) -> CallFault | None:
        """The fault that this call meets, if any."""
        self._counts[method, zone] += 1
        number = self._counts[method, zone]
        for index, fault in enumerate(self.plan.calls):
            if fault.covers(method, zone, number, age) and self.draw(
                fault.probability, f"call/{index}/{method}/{zone}/{number}"
            ):
                return fault
        return None

    def draw(self, probability: float, what: str) -> bool:
        return random.Random(f"{self.plan.seed}/{what}").random() < probability
