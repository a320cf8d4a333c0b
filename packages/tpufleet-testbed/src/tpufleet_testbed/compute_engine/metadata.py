"""The values of a VM's metadata server. Those of a slice are as Google's images and JAX read them:
names without addresses, in the order of the workers."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping

from tpufleet_testbed.cloud_tpu.api_errors import PROJECT_NUMBER
from tpufleet_testbed.compute_engine import catalog, views
from tpufleet_testbed.compute_engine.records import Maintenance, Vm


def values_of(vm: Vm, *, with_slice: bool = True) -> dict[str, str]:
    """By path below `instance/`."""
    attributes = {**vm.metadata, **(slice_attributes(vm) if with_slice else {})}
    interface = views.network_interfaces(vm)[0]
    accounts = vm.properties.get("serviceAccounts", [])
    values = {
        **{f"attributes/{key}": value for key, value in attributes.items()},
        "id": str(vm.number),
        "name": vm.name,
        "hostname": f"{vm.name}.{vm.zone}.c.{vm.project}.internal",
        "zone": f"projects/{PROJECT_NUMBER}/zones/{vm.zone}",
        "machine-type": f"projects/{PROJECT_NUMBER}/machineTypes/{vm.machine.name}",
        "network-interfaces/0/ip": interface["networkIP"],
        "preempted": "FALSE",
        "maintenance-event": "NONE",
        "scheduling/on-host-maintenance": "TERMINATE",
        "scheduling/automatic-restart": "TRUE" if vm.restarts else "FALSE",
        "scheduling/preemptible": "TRUE" if vm.model == "SPOT" else "FALSE",
    }
    for account in accounts[:1]:
        digest = hashlib.sha256(vm.key.encode()).hexdigest()
        root = "service-accounts/default"
        values |= {
            f"{root}/email": account.get("email", "default"),
            f"{root}/scopes": "\n".join(account.get("scopes", [])),
            f"{root}/token": json.dumps(
                {"access_token": f"ya29.{digest}", "expires_in": 3599, "token_type": "Bearer"}
            ),
        }
    return values


def slice_attributes(vm: Vm) -> dict[str, str]:
    """Those that the platform writes."""
    names = workers(vm)
    topology = slice_topology(vm)
    generation = vm.machine.generation
    size = catalog.counted(vm.machine, catalog.chips_of(topology))
    environment: Mapping[str, str] = {
        "TPU_ACCELERATOR_TYPE": f"{generation.environment_type}-{size}",
        "TOPOLOGY": topology,
        "TPU_WORKER_ID": str(vm.worker),
        "HOST_BOUNDS": host_bounds(topology, vm.machine.chips),
        "CHIPS_PER_HOST_BOUNDS": chip_bounds(vm.machine.chips),
        "ZONE": vm.zone,
    }
    return {
        "accelerator-type": f"{generation.accelerator_type}-{size}",
        "agent-worker-number": str(vm.worker),
        "worker-id": str(vm.worker),
        "worker-network-endpoints": ",".join(names),
        "tpu-env": "".join(f"{name}: '{value}'\n" for name, value in environment.items()),
    }


def workers(vm: Vm) -> list[str]:
    """Names of the VMs of its slice, in the order of their numbers."""
    if vm.group is None or not vm.group.topology:
        return [vm.name]
    return [member.name for member in sorted(vm.group.members.values(), key=lambda m: m.worker)]


def slice_topology(vm: Vm) -> str:
    if vm.group is not None and vm.group.topology:
        return vm.group.topology
    chips = vm.machine.chips
    return next((each for each in vm.machine.topologies if catalog.chips_of(each) == chips), "")


def chip_bounds(chips: int) -> str:
    width = 2 ** (int(math.log2(chips)) // 2)
    return f"{width},{chips // width},1"


def host_bounds(topology: str, chips: int) -> str:
    sides = [*map(int, topology.split("x")), 1][:3]
    host = [int(each) for each in chip_bounds(chips).split(",")]
    return ",".join(str(max(1, side // each)) for side, each in zip(sides, host, strict=True))


def as_json(window: Maintenance) -> str:
    """`upcoming-maintenance?alt=json`"""
    shown = views.maintenance(window)
    kept = ("type", "canReschedule", "maintenanceStatus", "windowStartTime", "windowEndTime",
            "latestWindowStartTime")  # fmt: skip
    names = {name: re.sub("[A-Z]", lambda m: f"_{m[0].lower()}", name) for name in kept}
    return json.dumps({names[name]: str(shown[name]) for name in kept})
