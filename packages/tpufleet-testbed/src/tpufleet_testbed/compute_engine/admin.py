"""Faults on command, beside the API: `POST /compute/testbed/v1/injectFault`.

{"target": "a VM or group", "fault": "preempt", "zone": "optional", "seconds": 0}
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from tpufleet.model.values import encoding
from tpufleet_testbed.compute_engine.api_errors import RestError, invalid
from tpufleet_testbed.compute_engine.engine import ComputeEngine
from tpufleet_testbed.compute_engine.records import Group, Vm

PREFIX = "compute/testbed/v1/"


@dataclass(frozen=True, kw_only=True, slots=True)
class InjectFault:
    """`vm-` faults are those of one VM; of a group they meet `host`, or else all of its VMs."""

    target: str
    fault: Literal[
        "preempt", "host-error", "delete", "vanish", "maintenance", "emergency-maintenance",
        "topology-failure", "kill-host", "stall-host",
    ]  # fmt: skip
    host: int | None = None  # worker number
    seconds: float = 0.0  # until maintenance begins


def answer(engine: ComputeEngine, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with engine.lock:
        now = engine.run_due()
        if path.removeprefix(PREFIX) == "billing":
            return {
                "vms": [
                    {
                        "name": entry.node, "zone": entry.zone, "chips": entry.chips,
                        "seconds": ((entry.ended_at or now) - entry.began_at).total_seconds(),
                        "running": entry.ended_at is None, "endedBy": entry.ended_by,
                    }
                    for entry in engine.ledger.entries
                ],
                "denied": engine.ledger.denied,
            }  # fmt: skip
        request = encoding.from_json(encoding.to_json(body), InjectFault)
        group, vms = find(engine, request.target, request.host)
        inject(engine, request, group, vms)
        engine.run_due()
        return {"vms": {vm.name: vm.status for vm in vms}}


def find(engine: ComputeEngine, target: str, host: int | None) -> tuple[Group | None, list[Vm]]:
    for group in engine.groups.values():
        if group.name == target:
            vms = [vm for vm in group.vms if host in (None, vm.worker)]
            return group, vms
    vms = [vm for vm in engine.vms.values() if vm.name == target]
    if not vms:
        raise RestError(404, "notFound", f"no VM or group {target!r}")
    return vms[0].group, vms


def inject(engine: ComputeEngine, request: InjectFault, group: Group | None, vms: list[Vm]) -> None:
    now = engine.clock.now()
    if request.fault == "topology-failure":
        if group is None or not group.topology:
            raise invalid(f"{request.target} has no topology")
        if group.topology_state in ("ACTIVE", "REACTIVATING"):
            engine.fail_topology(group, now)
        engine.failing_topologies.add(group.name)
        return
    if request.fault in ("maintenance", "emergency-maintenance"):
        scheduled = request.fault == "maintenance"
        reason = "PLANNED_UPDATE" if scheduled else "FAILURE_TPU"
        ahead = timedelta(seconds=request.seconds)
        for vm in vms[:1]:
            engine.announce_maintenance(vm, ahead, scheduled=scheduled, reason=reason)
        return
    for vm in vms:
        match request.fault:
            case "preempt":
                engine.preempt(vm, now)
            case "host-error":
                engine.host_error(vm, now)
            case "delete":
                engine.delete_vm(vm, now)
            case "vanish":
                engine.vanish(vm, now)
            case "kill-host":
                engine.hosts.kill(vm)
            case "stall-host":
                engine.hosts.stall(vm)
