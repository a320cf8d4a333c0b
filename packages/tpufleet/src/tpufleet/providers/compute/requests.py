"""Request bodies for an order: a workload policy, an instance template and a group, or an instance.

A slice of several hosts is a managed instance group in bulk mode, which waits until all of its VMs
can be created, with a workload policy, which joins their chips
(cloud.google.com/compute/docs/tpus/create-tpu-mig-multi-host-slice). A single host is an instance,
or a group of one where capacity is waited for or reserved: the group remains when Google deletes
its VM, and tells why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tpufleet.errors import BadInput, BadRequest, not_available
from tpufleet.model.fleet.fleets import check_name, check_zone
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import machine_types, type_lookup
from tpufleet.model.tpu.type_lookup import Accelerator
from tpufleet.providers.base import Order, find_type, require_zone
from tpufleet.providers.compute import naming
from tpufleet.providers.compute.naming import Location
from tpufleet.providers.compute.settings import ComputeSettings
from tpufleet.providers.tpu_vm import naming as metadata_keys
from tpufleet.providers.tpu_vm import startup_script
from tpufleet.providers.tpu_vm.settings import CLOUD_PLATFORM

# cloud.google.com/compute/docs/tpus/tpu-machines
MACHINES = frozenset(
    {"ct5p-hightpu-4t", "ct6e-standard-1t", "ct6e-standard-4t", "ct6e-standard-8t",
     "tpu7x-standard-4t"}
)  # fmt: skip
# cloud.google.com/compute/docs/reference/rest/v1/instanceGroupManagers/insert
MAX_VMS = 1000
RESERVATION_KEY = "compute.googleapis.com/reservation-name"
STANDARD = "STANDARD"
MODELS = {
    Capacity.SPOT: "SPOT",
    Capacity.ON_DEMAND: STANDARD,
    Capacity.QUEUED: "FLEX_START",
    Capacity.RESERVED: "RESERVATION_BOUND",
}
# Google requires DELETE for flex-start, and for groups that are bound to a reservation. A preempted
# VM that is only stopped tells that it was preempted.
_AT_END = {"SPOT": "STOP", "FLEX_START": "DELETE", "RESERVATION_BOUND": "DELETE"}

Json = dict[str, Any]


def validate(order: Order, settings: ComputeSettings) -> Accelerator:
    """BadRequest before any call is sent."""
    try:
        for slice_id in order.slices:
            check_name(slice_id)
        check_zone(order.zone)
    except BadInput as error:
        raise BadRequest(str(error)) from error
    accelerator = find_type(order.accelerator)
    require_zone(order.zone, settings.zones, "compute.zones")
    if accelerator.machine_type not in MACHINES:
        other = "tpu-vm" if accelerator.runtime else "gke"
        name = type_lookup.short_name(accelerator.name)
        raise BadRequest(not_available(name, "as Compute Engine instances", other))
    if accelerator.hosts > MAX_VMS:
        hosts = f"{accelerator.hosts:,} VMs; a group of Compute Engine has at most {MAX_VMS:,}"
        raise BadRequest(f"{type_lookup.short_name(accelerator.name)} needs {hosts}")
    if order.capacity is Capacity.RESERVED and not (settings.reservation or order.node):
        raise BadRequest(
            "no reservation; set `reservation` in compute, or allow another capacity type"
        )
    return accelerator


def uses_group(accelerator: Accelerator, capacity: Capacity) -> bool:
    return accelerator.hosts > 1 or capacity in (Capacity.QUEUED, Capacity.RESERVED)


def policy(fleet: str, topology: str) -> Json:
    return {
        "name": naming.policy(fleet, topology),
        "description": "Topology of slices of tpufleet",
        "workloadPolicy": {
            "type": "HIGH_THROUGHPUT",
            "acceleratorTopology": topology,
            "acceleratorTopologyMode": "AUTO_CONNECT",
        },
    }


def template(
    order: Order, accelerator: Accelerator, settings: ComputeSettings, *, bound: bool = True
) -> Json:
    """Without what differs between slices, which is part of the group. `bound`: whether reserved
    VMs are bound to their reservation."""
    properties = {
        **_machine(order, accelerator, settings, bound),
        "machineType": accelerator.machine_type,
        "disks": [_boot_disk(accelerator, settings, "")],
        "labels": {naming.FLEET: metadata_keys.label_value(order.fleet)},
        "metadata": items({**settings.metadata, **startup_script.metadata(accelerator, settings)}),
    }
    return {"name": naming.template(order.fleet, properties), "properties": properties}


def group(
    order: Order, slice_id: SliceId, accelerator: Accelerator, template_name: str,
    location: Location, *, bulk: bool = True,
) -> Json:  # fmt: skip
    body: Json = {
        "name": slice_id,
        "baseInstanceName": naming.base_name(slice_id),
        "instanceTemplate": location.template(template_name),
        "targetSize": accelerator.hosts,
        # A lost VM is the end of the slice: tpufleet replaces it as a whole.
        "instanceLifecyclePolicy": {"defaultActionOnFailure": "DO_NOTHING"},
        "allInstancesConfig": {
            "properties": {
                "labels": naming.labels(order, slice_id),
                "metadata": {
                    **_own_metadata(order, slice_id),
                    metadata_keys.ACCELERATOR: accelerator.name,  # for what reads the group
                },
            }
        },
    }
    if bulk:
        body["targetSizePolicy"] = {"mode": "BULK"}
    if accelerator.hosts > 1:
        policy_name = naming.policy(order.fleet, accelerator.topology)
        body["resourcePolicies"] = {"workloadPolicy": location.policy(policy_name)}
    return body


def instance(
    order: Order, slice_id: SliceId, accelerator: Accelerator, settings: ComputeSettings,
    location: Location,
) -> Json:  # fmt: skip
    zone = f"zones/{location.zone}"
    return {
        **_machine(order, accelerator, settings),
        "name": slice_id,
        "machineType": f"{zone}/machineTypes/{accelerator.machine_type}",
        "disks": [_boot_disk(accelerator, settings, f"{zone}/diskTypes/")],
        "labels": naming.labels(order, slice_id),
        "metadata": items(
            {
                **settings.metadata,
                **startup_script.metadata(accelerator, settings),
                **_own_metadata(order, slice_id),
            }
        ),
    }


def _machine(
    order: Order, accelerator: Accelerator, settings: ComputeSettings, bound: bool = True
) -> Json:
    """What instances and templates say in the same way."""
    interface: Json = {"nicType": "GVNIC"}
    if subnetwork := settings.subnetwork_path(order.zone):
        interface["subnetwork"] = subnetwork  # of a network that it names itself
    else:
        default = f"projects/{settings.project}/global/networks/default"
        interface["network"] = settings.network_path or default
    if settings.external_ips:
        interface["accessConfigs"] = [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}]
    body: Json = {
        "networkInterfaces": [interface],
        "serviceAccounts": [
            {"email": settings.service_account or "default", "scopes": [CLOUD_PLATFORM]}
        ],
        "scheduling": _scheduling(order.capacity, settings, bound),
        "reservationAffinity": _affinity(order.capacity, settings),
    }
    if settings.tags:
        body["tags"] = {"items": list(settings.tags)}
    return body


def _scheduling(capacity: Capacity, settings: ComputeSettings, bound: bool) -> Json:
    """TPUs cannot migrate: onHostMaintenance is always TERMINATE."""
    model = MODELS[capacity] if bound or capacity is not Capacity.RESERVED else STANDARD
    body: Json = {
        "provisioningModel": model,
        "onHostMaintenance": "TERMINATE",
        "automaticRestart": model == STANDARD,
    }
    if model in _AT_END:
        body["instanceTerminationAction"] = _AT_END[model]
    if capacity is Capacity.QUEUED:
        seconds = int(settings.run_duration.total_seconds())
        body["maxRunDuration"] = {"seconds": str(seconds)}
    return body


def _affinity(capacity: Capacity, settings: ComputeSettings) -> Json:
    """Spot and flex-start VMs cannot use reservations; on-demand ones use a matching one that is
    open to them, as Google's default is."""
    if capacity is Capacity.RESERVED:
        return {
            "consumeReservationType": "SPECIFIC_RESERVATION",
            "key": RESERVATION_KEY,
            "values": [settings.reservation],
        }
    any_one = capacity is Capacity.ON_DEMAND
    return {"consumeReservationType": "ANY_RESERVATION" if any_one else "NO_RESERVATION"}


def _boot_disk(accelerator: Accelerator, settings: ComputeSettings, types: str) -> Json:
    machine = accelerator.machine_type or ""
    return {
        "boot": True,
        "autoDelete": True,
        "initializeParams": {
            "sourceImage": settings.image(accelerator.generation),
            "diskSizeGb": str(settings.disk_gb),
            "diskType": types + machine_types.default_disk_type(machine),
        },
    }


def _own_metadata(order: Order, slice_id: SliceId) -> dict[str, str]:
    """Only its own token: each slice of a gang has hosts and metadata of its own."""
    own = replace(order, slices=(slice_id,), tokens={slice_id: order.tokens[slice_id]})
    return metadata_keys.metadata(own)


def items(values: Mapping[str, str]) -> Json:
    return {"items": [{"key": key, "value": values[key]} for key in sorted(values)]}
