"""Faults of a plan that happen at set times: preemption storms and zone outages."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from fnmatch import fnmatchcase
from functools import partial

from tpufleet_testbed import faults
from tpufleet_testbed.compute_engine.engine import ComputeEngine
from tpufleet_testbed.compute_engine.records import Vm
from tpufleet_testbed.faults import PreemptionStorm


def schedule_faults(engine: ComputeEngine) -> None:
    start = engine.started_at
    for index, storm in enumerate(engine.plan.storms):
        first = partial(_run_storm, engine, storm, index, 1)
        engine.schedule(start + storm.after + storm.every, first)
    for outage in engine.plan.closings:
        if outage.takes:
            engine.schedule(start + outage.after, partial(_take_zone, engine, outage.zone))


def _run_storm(
    engine: ComputeEngine, storm: PreemptionStorm, index: int, round_: int, at: datetime
) -> None:
    """A slice is preempted as a whole, by its group; a VM by itself."""
    if storm.until is not None and at >= engine.started_at + storm.until:
        return
    for name, vms in _slices(engine, storm.zone).items():
        if faults.draw(engine.plan.seed, storm.share, f"storm/{index}/{round_}/{name}"):
            _preempt(engine, vms, at)
    again = partial(_run_storm, engine, storm, index, round_ + 1)
    engine.schedule(at + storm.every, again)


def _slices(engine: ComputeEngine, zone: str) -> dict[str, list[Vm]]:
    found: dict[str, list[Vm]] = {}
    for vm in engine.vms.values():
        if vm.model == "SPOT" and vm.has_machine and fnmatchcase(vm.zone, zone):
            key = vm.group.name if vm.group is not None and vm.group.topology else vm.name
            found.setdefault(key, []).append(vm)
    return found


def _take_zone(engine: ComputeEngine, zone: str, at: datetime) -> None:
    for vms in _slices(engine, zone).values():
        _preempt(engine, vms, at)


def _preempt(engine: ComputeEngine, vms: Iterable[Vm], at: datetime) -> None:
    for vm in vms:
        engine.preempt(vm, at)
