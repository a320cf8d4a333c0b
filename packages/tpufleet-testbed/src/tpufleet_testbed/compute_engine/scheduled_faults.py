"""Faults of a plan that happen at set times: preemption storms and zone outages."""

from __future__ import annotations

from datetime import datetime
from fnmatch import fnmatchcase

from tpufleet_testbed import faults
from tpufleet_testbed.compute_engine.engine import ComputeEngine
from tpufleet_testbed.compute_engine.records import Vm


def schedule_faults(engine: ComputeEngine) -> None:
    def slices(zone: str) -> dict[object, list[Vm]]:
        """A slice is preempted as a whole, by its group; a VM by itself."""
        found: dict[object, list[Vm]] = {}
        for vm in engine.vms.values():
            if vm.model == "SPOT" and vm.has_machine and fnmatchcase(vm.zone, zone):
                key = vm.group.name if vm.group is not None and vm.group.topology else vm.name
                found.setdefault(key, []).append(vm)
        return found

    def preempt(vms: list[Vm], at: datetime, storm: object) -> None:
        for vm in vms:
            engine.preempt(vm, at)

    faults.schedule_storms(engine.plan, engine.started_at, engine.schedule, slices, preempt)
