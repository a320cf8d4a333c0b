"""What the fault plans of emulated clouds share: calls that fail, preemption storms, zone outages.

Seeded: the same plan and the same calls give the same faults.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from msgspec import Meta

from tpufleet.model.values import durations

T = TypeVar("T")
Share = Annotated[float, Meta(ge=0, le=1)]
Duration: Any = Annotated[timedelta, durations.within()]


class TimeWindow(msgspec.Struct, frozen=True, kw_only=True):
    after: Duration = timedelta(0)  # since the emulator started
    until: Duration | None = None

    def contains(self, age: timedelta) -> bool:
        return self.after <= age and (self.until is None or age < self.until)


class FailingCall(TimeWindow, frozen=True, kw_only=True):
    """A call that fails: the n-th one, with some probability, for some time, or always."""

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
    """At regular intervals, each spot slice is preempted with probability `share`."""

    every: Annotated[timedelta, durations.within(least=1)]
    share: Share
    zone: str = "*"
    notice: bool = False  # send a notice first


class ZoneOutage(TimeWindow, frozen=True, kw_only=True):
    """A zone without capacity for some time, which preempts its spot slices at the start."""

    zone: str
    takes: bool = True  # preempt spot slices


def zone_closed(closings: Iterable[ZoneOutage], zone: str, age: timedelta) -> bool:
    """Whether the zone has no capacity at this time since the start."""
    return any(fnmatchcase(zone, outage.zone) and outage.contains(age) for outage in closings)


def draw(seed: int, probability: float, key: str) -> bool:
    """A random draw that depends only on the seed and the key."""
    return random.Random(f"{seed}/{key}").random() < probability


class _Plan(Protocol):
    @property
    def seed(self) -> int: ...
    @property
    def calls(self) -> Sequence[Any]: ...
    @property
    def storms(self) -> Sequence[PreemptionStorm]: ...
    @property
    def closings(self) -> Sequence[ZoneOutage]: ...


def schedule_storms(
    plan: _Plan,
    start: datetime,
    schedule: Callable[[datetime, Callable[[datetime], None]], None],
    targets: Callable[[str], Mapping[object, T]],
    preempt: Callable[[T, datetime, PreemptionStorm | None], None],
) -> None:
    """The storms of a plan, and preemptions at the start of its outages, without a storm. `targets`
    gives what is spot in zones, by a key that chance depends on."""

    def blow(index: int, number: int, at: datetime) -> None:
        storm = plan.storms[index]
        if storm.until is not None and at >= start + storm.until:
            return
        for key, target in targets(storm.zone).items():
            if draw(plan.seed, storm.share, f"storm/{index}/{number}/{key}"):
                preempt(target, at, storm)
        schedule(at + storm.every, partial(blow, index, number + 1))

    def close(zone: str, at: datetime) -> None:
        for target in targets(zone).values():
            preempt(target, at, None)

    for index, storm in enumerate(plan.storms):
        schedule(start + storm.after + storm.every, partial(blow, index, 1))
    for outage in plan.closings:
        if outage.takes:
            schedule(start + outage.after, partial(close, outage.zone))


@dataclass(slots=True)
class CallFaults:
    """Counts calls and matches them against a plan."""

    plan: _Plan
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def match(self, method: str, zone: str, age: timedelta) -> Any:
        """The fault for this call, or None."""
        self._counts[method, zone] += 1
        number = self._counts[method, zone]
        for index, fault in enumerate(self.plan.calls):
            if fault.covers(method, zone, number, age) and draw(
                self.plan.seed, fault.probability, f"call/{index}/{method}/{zone}/{number}"
            ):
                return fault
        return None
