"""Fault plans: random but reproducible faults of simulated slices.

A plan is a YAML file or dict. Durations are seconds. Every field is optional:

    seed: 7
    preempt_every: 300        # mean time until a slice is preempted
    notice_share: 0.5         # share of preemptions with notice
    maintenance_every: 3600   # mean time until a maintenance notice
    kill_host_every: 1800     # mean time until one host dies
    stall_host_every: 1800    # mean time until one host stalls
    slow_boot: [5, 20]        # range of the boot time
    partial_boot: 0.1         # probability that one host never boots
    out_of_stock:             # counted from the first use of the state folder
      - {zone: "us-*", from: 0, until: 120}
    script:                   # exact: n-th slice ever requested, time after its boot
      - {slice: 0, after: 20, fault: preempt}
      - {slice: 1, after: 5, fault: kill-host, host: 2}

The faults of a slice depend only on the seed and its number (the n-th slice in this state folder),
not on its name or the time of the request, so a run can be repeated.
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
    """A fault, at a time after the boot of its slice."""

    after: timedelta
    fault: Fault
    host: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultSchedule:
    """The faults that a plan holds for one slice."""

    boot_time: timedelta = timedelta()
    missing: tuple[int, ...] = ()  # hosts that never boot
    faults: tuple[PlannedFault, ...] = ()  # by time


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
            fnmatchcase(zone, stockout.zone) and stockout.start <= since_start < stockout.end
            for stockout in self.out_of_stock
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
        rng = self._random(number, "partial")
        return (rng.randrange(hosts),) if rng.random() < self.partial_boot else ()

    def _random(self, number: int, *purpose: str) -> random.Random:
        return random.Random("/".join((str(self.seed), str(number), *purpose)))


HOST_FAULTS = frozenset({Fault.KILL_HOST, Fault.STALL_HOST})
NO_FAULTS = FaultPlan()


def load(path: Path) -> FaultPlan:
    return parse(yaml.safe_load(path.read_text()) or {})


def parse(plan: Mapping[str, Any]) -> FaultPlan:
    """A plan from a dict in the format above. BadInput names the invalid field."""
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
    parsed: dict[str, Any] = {
        name: readers.get(name, _span)(value, name) for name, value in plan.items()
    }
    return FaultPlan(**parsed)


def _only(entry: Any, known: list[str], where: str) -> None:
    if not isinstance(entry, Mapping):
        raise BadInput(f"fault plan{where}: expected a mapping, got {entry!r}")
    for name in entry:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise BadInput(f"fault plan{where}: unknown field {name!r}; {hint}")


def _number(value: Any, where: str, most: float = float("inf")) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        limit = f"to {most:g}" if most < float("inf") else "or more"
        raise BadInput(f"fault plan, {where}: {value!r} is not a number of 0 {limit}")
    return float(value)


def _whole(value: Any, where: str) -> int:
    number = _number(value, where)
    if not number.is_integer():
        raise BadInput(f"fault plan, {where}: {value!r} is not an integer")
    return int(number)


def _share(value: Any, where: str) -> float:
    return _number(value, where, most=1)


def _span(value: Any, where: str) -> timedelta:
    seconds = _number(value, where)
    if where.endswith("_every") and seconds == 0:
        raise BadInput(f"fault plan, {where}: must be more than 0 seconds")
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
        raise BadInput(f"fault plan, {where}: expected a list, got {value!r}")
    return list(value)


def _stockouts(value: Any, where: str) -> tuple[Stockout, ...]:
    stockouts = []
    for entry in _entries(value, where):
        _only(entry, ["zone", "from", "until"], f", {where}")
        end = _span(entry["until"], f"{where}.until") if "until" in entry else timedelta.max
        start = _span(entry.get("from", 0), f"{where}.from")
        stockouts.append(Stockout(zone=str(entry.get("zone", "*")), start=start, end=end))
    return tuple(stockouts)


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
