"""Planned faults: what a seed has in store for each simulated slice.

A plan is a small YAML file or dict. Spans are seconds. Everything is optional:

    seed: 7
    preempt_every: 300        # mean life of a slice until it is preempted
    notice_share: 0.5         # of these, how many are announced first
    maintenance_every: 3600   # mean time until a maintenance notice
    kill_host_every: 1800     # mean time until one host dies
    stall_host_every: 1800    # mean time until one host stops answering
    slow_boot: [5, 20]        # a boot takes between these
    partial_boot: 0.1         # how probable it is that one host never comes up
    out_of_stock:             # counted from the first use of the state folder
      - {zone: "us-*", from: 0, until: 120}
    script:                   # exact: the n-th slice ever asked for, so long after its boot
      - {slice: 0, after: 20, fault: preempt}
      - {slice: 1, after: 5, fault: kill-host, host: 2}

What befalls a slice depends on the seed and on its number alone (the n-th slice that this state
folder ever held), not on its name nor on when it was asked for: a run can be repeated.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from tpufleet.errors import BadInput
from tpufleet.providers.base import Fault


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFault:
    """One thing that will happen to a slice, so long after its boot."""

    after: timedelta
    fault: Fault
    host: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultSchedule:
    """All that a plan has in store for one slice."""

    boot_time: timedelta = timedelta()
    missing: tuple[int, ...] = ()  # hosts that never come up
    faults: tuple[PlannedFault, ...] = ()  # in order of time


@dataclass(frozen=True, kw_only=True, slots=True)
class Stockout:
    zone: str  # may hold * and ?
    start: timedelta
    end: timedelta


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedFault:
    slice: int
    planned: PlannedFault


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    seed: int = 0
    preempt_every: timedelta | None = None
    notice_share: float = 0.0
    maintenance_every: timedelta | None = None
    kill_host_every: timedelta | None = None
    stall_host_every: timedelta | None = None
    slow_boot: tuple[timedelta, timedelta] | None = None
    partial_boot: float = 0.0
    out_of_stock: tuple[Stockout, ...] = ()
    script: tuple[ScriptedFault, ...] = ()

    def schedule_for(self, number: int, hosts: int) -> FaultSchedule:
        """What befalls the slice of this number. Each kind has dice of its own, so that changing
        one rate leaves the others as they were."""
        faults = [entry.planned for entry in self.script if entry.slice == number]
        for mean, fault in (
            (self.preempt_every, self._preemption_fault(number)),
            (self.maintenance_every, Fault.MAINTENANCE),
            (self.kill_host_every, Fault.KILL_HOST),
            (self.stall_host_every, Fault.STALL_HOST),
        ):
            if mean is not None:
                dice = self._random(number, "host" if fault in HOST_FAULTS else "slice", fault)
                after = timedelta(seconds=dice.expovariate(1 / mean.total_seconds()))
                host = dice.randrange(hosts) if fault in HOST_FAULTS else None
                faults.append(PlannedFault(after=after, fault=fault, host=host))
        return FaultSchedule(
            boot_time=self._boot(number),
            missing=self._missing(number, hosts),
            faults=tuple(sorted(faults, key=lambda planned: planned.after)),
        )

    def in_stock(self, zone: str, since_start: timedelta) -> bool:
        return not any(
            fnmatchcase(zone, drought.zone) and drought.start <= since_start < drought.end
            for drought in self.out_of_stock
        )

    def _preemption_fault(self, number: int) -> Fault:
        announced = self._random(number, "notice").random() < self.notice_share
        return Fault.PREEMPT_NOTICE if announced else Fault.PREEMPT

    def _boot(self, number: int) -> timedelta:
        if self.slow_boot is None:
            return timedelta()
        low, high = (span.total_seconds() for span in self.slow_boot)
        return timedelta(seconds=self._random(number, "boot").uniform(low, high))

    def _missing(self, number: int, hosts: int) -> tuple[int, ...]:
        dice = self._random(number, "partial")
        return (dice.randrange(hosts),) if dice.random() < self.partial_boot else ()

    def _random(self, number: int, *purpose: str) -> random.Random:
        return random.Random("/".join((str(self.seed), str(number), *purpose)))


HOST_FAULTS = frozenset({Fault.KILL_HOST, Fault.STALL_HOST})
NO_FAULTS = FaultPlan()


def load(path: Path) -> FaultPlan:
    return parse(yaml.safe_load(path.read_text()) or {})


def parse(plan: Mapping[str, Any]) -> FaultPlan:
    """A plan from a dict of the format above. BadInput names the field that is wrong."""
    readers = {
        "seed": _whole,
        "notice_share": _share,
        "partial_boot": _share,
        "slow_boot": _range,
        "out_of_stock": _stockouts,
        "script": _script,
    }
    known = [field.name for field in fields(FaultPlan)]
    _only(plan, known, "")
    return FaultPlan(
        **{name: readers.get(name, _span)(value, name) for name, value in plan.items()}
    )


def _only(entry: Any, known: list[str], where: str) -> None:
    if not isinstance(entry, Mapping):
        raise BadInput(f"fault plan{where}: expected names and values, found {entry!r}")
    for name in entry:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            cure = f"did you mean {close[0]}?" if close else f"it may hold {', '.join(known)}"
            raise BadInput(f"fault plan{where}: there is no {name!r}; {cure}")


def _number(value: Any, where: str, most: float = float("inf")) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        limit = f"to {most:g}" if most < float("inf") else "or more"
        raise BadInput(f"fault plan, {where}: {value!r} is not a number of 0 {limit}")
    return float(value)


def _whole(value: Any, where: str) -> int:
    number = _number(value, where)
    if not number.is_integer():
        raise BadInput(f"fault plan, {where}: {value!r} is not a whole number")
    return int(number)


def _share(value: Any, where: str) -> float:
    return _number(value, where, most=1)


def _span(value: Any, where: str) -> timedelta:
    seconds = _number(value, where)
    if where.endswith("_every") and seconds == 0:
        raise BadInput(f"fault plan, {where}: give more than 0 seconds, or leave it out")
    return timedelta(seconds=seconds)


def _range(value: Any, where: str) -> tuple[timedelta, timedelta]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise BadInput(f"fault plan, {where}: {value!r} is not [shortest, longest] in seconds")
    low, high = _span(value[0], where), _span(value[1], where)
    if low > high:
        raise BadInput(f"fault plan, {where}: {value[0]} is longer than {value[1]}; swap them")
    return low, high


def _entries(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise BadInput(f"fault plan, {where}: expected a list, found {value!r}")
    return list(value)


def _stockouts(value: Any, where: str) -> tuple[Stockout, ...]:
    droughts = []
    for entry in _entries(value, where):
        _only(entry, ["zone", "from", "until"], f", {where}")
        end = _span(entry["until"], f"{where}.until") if "until" in entry else timedelta.max
        start = _span(entry.get("from", 0), f"{where}.from")
        droughts.append(Stockout(zone=str(entry.get("zone", "*")), start=start, end=end))
    return tuple(droughts)


def _script(value: Any, where: str) -> tuple[ScriptedFault, ...]:
    script = []
    for entry in _entries(value, where):
        _only(entry, ["slice", "after", "fault", "host"], f", {where}")
        try:
            fault = Fault(entry.get("fault"))
        except ValueError as error:
            kinds = ", ".join(Fault)
            raise BadInput(f"fault plan, {where}.fault: {error}; there are {kinds}") from error
        host = _whole(entry.get("host", 0), f"{where}.host") if fault in HOST_FAULTS else None
        after = _span(entry.get("after", 0), f"{where}.after")
        planned = PlannedFault(after=after, fault=fault, host=host)
        number = _whole(entry.get("slice", 0), f"{where}.slice")
        script.append(ScriptedFault(slice=number, planned=planned))
    return tuple(script)
