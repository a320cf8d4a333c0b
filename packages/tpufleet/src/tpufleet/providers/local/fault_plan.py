"""Fault plans: random but reproducible faults of simulated slices. An example is in
docs/simulated-slices.md.

The faults of a slice depend only on the seed and its number (the n-th slice in this state folder),
not on its name or the time of the request, so a run can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tpufleet import schema
from tpufleet.model.values import durations
from tpufleet.providers.base import Fault

_Span = Annotated[timedelta, durations.within()]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Index = Annotated[int, Meta(ge=0)]


class PlannedFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault, at a time after the boot of its slice."""

    after: timedelta
    fault: Fault
    host: int | None = None


class FaultSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """The faults that a plan holds for one slice."""

    boot_time: timedelta = timedelta()
    missing: tuple[int, ...] = ()  # hosts that never boot
    faults: tuple[PlannedFault, ...] = ()  # by time


class Stockout(msgspec.Struct, frozen=True, kw_only=True):
    zone: str = "*"  # may hold * and ?
    start: _Span = msgspec.field(default=timedelta(), name="from")
    until: _Span = timedelta.max


class ScriptedFault(msgspec.Struct, frozen=True, kw_only=True):
    slice: _Index = 0
    after: _Span = timedelta()
    fault: Fault
    host: _Index = 0  # of faults of one host

    @property
    def planned(self) -> PlannedFault:
        host = self.host if self.fault in HOST_FAULTS else None
        return PlannedFault(after=self.after, fault=self.fault, host=host)


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True):
    seed: _Index = 0
    preempt_every: _Span | None = None
    notice_share: _Share = 0.0
    maintenance_every: _Span | None = None
    kill_host_every: _Span | None = None
    stall_host_every: _Span | None = None
    slow_boot: Annotated[tuple[_Span, ...], Meta(max_length=2)] = ()  # shortest and longest
    partial_boot: _Share = 0.0
    out_of_stock: tuple[Stockout, ...] = ()
    script: tuple[ScriptedFault, ...] = ()

    def check(self) -> Iterator[tuple[str, str]]:
        for name in ("preempt_every", "maintenance_every", "kill_host_every", "stall_host_every"):
            if getattr(self, name) == timedelta():
                yield name, "must be more than 0 seconds"
        if self.slow_boot and (len(self.slow_boot) < 2 or self.slow_boot[0] > self.slow_boot[1]):
            yield "slow_boot", "write [shortest, longest] in seconds"

    def schedule_for(self, number: int, hosts: int) -> FaultSchedule:
        """The faults of the n-th slice. Each kind of fault has its own random stream, so that
        changing one rate does not affect the others."""
        faults = [entry.planned for entry in self.script if entry.slice == number]
        for mean, fault in (
            (self.preempt_every, self._preemption_fault(number)),
            (self.maintenance_every, Fault.MAINTENANCE),
            (self.kill_host_every, Fault.KILL_HOST),
            (self.stall_host_every, Fault.STALL_HOST),
        ):
            if mean is not None:
                rng = self._random(number, "host" if fault in HOST_FAULTS else "slice", fault)
                after = timedelta(seconds=rng.expovariate(1 / mean.total_seconds()))
                host = rng.randrange(hosts) if fault in HOST_FAULTS else None
                faults.append(PlannedFault(after=after, fault=fault, host=host))
        return FaultSchedule(
            boot_time=self._boot(number),
            missing=self._missing(number, hosts),
            faults=tuple(sorted(faults, key=lambda planned: planned.after)),
        )

    def in_stock(self, zone: str, since_start: timedelta) -> bool:
        return not any(
            fnmatchcase(zone, stockout.zone) and stockout.start <= since_start < stockout.until
            for stockout in self.out_of_stock
        )

    def _preemption_fault(self, number: int) -> Fault:
        announced = self._random(number, "notice").random() < self.notice_share
        return Fault.PREEMPT_NOTICE if announced else Fault.PREEMPT

    def _boot(self, number: int) -> timedelta:
        if not self.slow_boot:
            return timedelta()
        low, high = (span.total_seconds() for span in self.slow_boot)
        return timedelta(seconds=self._random(number, "boot").uniform(low, high))

    def _missing(self, number: int, hosts: int) -> tuple[int, ...]:
        rng = self._random(number, "partial")
        return (rng.randrange(hosts),) if rng.random() < self.partial_boot else ()

    def _random(self, number: int, *purpose: str) -> random.Random:
        return random.Random("/".join((str(self.seed), str(number), *purpose)))


HOST_FAULTS = frozenset({Fault.KILL_HOST, Fault.STALL_HOST})
NO_FAULTS = FaultPlan()


def load(path: Path) -> FaultPlan:
    import yaml  # slow to import and rarely needed

    return parse(yaml.safe_load(path.read_text()) or {})


def parse(plan: Mapping[str, Any]) -> FaultPlan:
    """A plan from a dict in the format above. BadInput names the invalid fields."""
    return schema.parse(FaultPlan, plan, path="faults")
