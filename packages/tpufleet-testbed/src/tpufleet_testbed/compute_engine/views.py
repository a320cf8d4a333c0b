"""VMs and groups as the API shows them."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

from tpufleet_testbed.compute_engine.operations import ROOT, timestamp
from tpufleet_testbed.compute_engine.records import COUNTERS, Group, Maintenance, Member, Vm

MAINTENANCE_WINDOW = timedelta(hours=4)
_BLOCK = 1 << 16  # addresses of 10.0.0.0/8 are handed out in order


def link(project: str, path: str) -> str:
    return f"{ROOT}/projects/{project}/{path}"


def instance(vm: Vm) -> dict[str, Any]:
    body = {
        name: value
        for name, value in vm.properties.items()
        if name not in ("params", "machineType", "disks", "networkInterfaces", "metadata")
    }
    scope = f"zones/{vm.zone}"
    disks = [
        {
            "kind": "compute#attachedDisk", "type": "PERSISTENT", "mode": "READ_WRITE",
            "index": index, **{key: disk[key] for key in disk if key != "initializeParams"},
            "source": disk.get("source") or link(vm.project, f"{scope}/disks/{vm.name}"),
            "diskSizeGb": str(disk.get("initializeParams", {}).get("diskSizeGb", 10)),
        }
        for index, disk in enumerate(vm.properties.get("disks", []))
    ]  # fmt: skip
    scheduling: dict[str, Any] = {
        "onHostMaintenance": "TERMINATE", "automaticRestart": vm.restarts,
        "preemptible": vm.model == "SPOT", "provisioningModel": vm.model, **vm.scheduling,
    }  # fmt: skip
    items = [{"key": key, "value": value} for key, value in vm.metadata.items()]
    shown: dict[str, Any] = {
        "kind": "compute#instance", "id": str(vm.number), **body, "name": vm.name,
        "status": vm.status, "creationTimestamp": timestamp(vm.created_at),
        "zone": link(vm.project, scope),
        "selfLink": link(vm.project, f"{scope}/instances/{vm.name}"),
        "machineType": link(vm.project, f"{scope}/machineTypes/{vm.machine.name}"),
        "disks": disks, "networkInterfaces": network_interfaces(vm), "scheduling": scheduling,
        "metadata": {
            "kind": "compute#metadata", "items": items,
            "fingerprint": f"m-{vm.number}-{vm.revision}",
        },
        "labelFingerprint": f"l-{vm.number}-{vm.revision}",
        "fingerprint": f"f-{vm.number}-{vm.generation}",
        "startRestricted": False, "deletionProtection": False,
        "resourceStatus": _resource_status(vm),
    }  # fmt: skip
    if vm.started_at is not None:
        shown["lastStartTimestamp"] = timestamp(vm.started_at)
    return shown


def network_interfaces(vm: Vm) -> list[dict[str, Any]]:
    """Addresses that are unique in the emulated cloud, and not reachable."""
    interfaces = []
    low = vm.number % _BLOCK
    for index, wanted in enumerate(vm.properties.get("networkInterfaces") or [{}]):
        region = vm.zone.rpartition("-")[0]
        shown = {
            "kind": "compute#networkInterface", "name": f"nic{index}",
            "network": wanted.get("network") or link(vm.project, "global/networks/default"),
            "subnetwork": wanted.get("subnetwork")
            or link(vm.project, f"regions/{region}/subnetworks/default"),
            "networkIP": f"10.{128 + index}.{low >> 8}.{low & 255}",
            **({"nicType": wanted["nicType"]} if "nicType" in wanted else {}),
        }  # fmt: skip
        if wanted.get("accessConfigs"):
            access = {
                "kind": "compute#accessConfig", "name": "external-nat", "type": "ONE_TO_ONE_NAT",
                "natIP": f"198.{18 + index}.{low >> 8}.{low & 255}",
            }  # fmt: skip
            shown["accessConfigs"] = [{**access, **wanted["accessConfigs"][0]}]
        interfaces.append(shown)
    return interfaces


def _resource_status(vm: Vm) -> dict[str, Any]:
    shown: dict[str, Any] = {"scheduling": {}}
    if vm.terminates_at is not None:
        shown["scheduling"]["terminationTimestamp"] = timestamp(vm.terminates_at)
    if vm.has_machine and vm.status != "PROVISIONING":
        slice_number = vm.group.number if vm.group is not None else vm.number
        shown["physicalHostTopology"] = {
            "cluster": f"cluster-{vm.zone}", "block": f"block-{slice_number % 97:02d}",
            "subblock": f"subblock-{slice_number:04d}", "host": f"host-{vm.number:06d}",
        }  # fmt: skip
    if vm.reservation:
        reservation = link(vm.project, f"zones/{vm.zone}/reservations/{vm.reservation}")
        shown["reservationConsumptionInfo"] = {"consumedReservation": reservation}
    if vm.maintenance is not None:
        shown["upcomingMaintenance"] = maintenance(vm.maintenance)
    return shown


def maintenance(window: Maintenance) -> dict[str, Any]:
    end = timestamp(window.start + MAINTENANCE_WINDOW)
    return {
        "type": "SCHEDULED" if window.scheduled else "UNSCHEDULED",
        "canReschedule": window.can_reschedule and not window.ongoing,
        "maintenanceStatus": "ONGOING" if window.ongoing else "PENDING",
        "maintenanceReasons": [window.reason],
        "windowStartTime": timestamp(window.start),
        "windowEndTime": end,
        "latestWindowStartTime": end,
        "maintenanceOnShutdown": False,
    }


def fingerprint(group: Group) -> str:
    return f"g{group.number}v{group.version}"


def is_stable(group: Group, *, after_loss: bool) -> bool:
    if group.in_progress or any(member.action != "NONE" for member in group.members.values()):
        return False
    if group.topology and group.topology_state in ("ACTIVATING", "REACTIVATING", "DEACTIVATING"):
        return False
    return after_loss or not group.members or group.all_run


def group(record: Group, *, stable: bool) -> dict[str, Any]:
    members = record.members.values()
    actions = Counter(member.action for member in members)
    names = {
        "NONE": "none", "CREATING": "creating", "RECREATING": "recreating", "DELETING": "deleting",
        "ABANDONING": "abandoning", "RESTARTING": "restarting", "REFRESHING": "refreshing",
        "VERIFYING": "verifying", "STARTING": "starting", "STOPPING": "stopping",
    }  # fmt: skip
    path = f"{record.scope}/instanceGroupManagers/{record.name}"
    version = {
        "instanceTemplate": _template(record),
        "targetSize": {"fixed": record.target_size, "calculated": record.target_size},
    }  # fmt: skip
    place = "zone" if record.scope.startswith("zones/") else "region"
    lifecycle = {
        "defaultActionOnFailure": "REPAIR", "forceUpdateOnRepair": "NO",
        **record.body.get("instanceLifecyclePolicy", {}),
    }  # fmt: skip
    return {
        "kind": "compute#instanceGroupManager", **record.body, "id": str(record.number),
        "creationTimestamp": timestamp(record.created_at), "name": record.name,
        place: link(record.project, record.scope), "selfLink": link(record.project, path),
        "instanceGroup": link(record.project, f"{record.scope}/instanceGroups/{record.name}"),
        "instanceTemplate": version["instanceTemplate"], "versions": [version],
        "targetSize": record.target_size, "instanceLifecyclePolicy": lifecycle,
        "targetSizePolicy": {"mode": "BULK" if record.bulk else "INDIVIDUAL"},
        "fingerprint": fingerprint(record),
        "currentActions": {key: actions[action] for action, key in names.items()},
        "status": _status(record, stable),
    }  # fmt: skip


def _status(record: Group, stable: bool) -> dict[str, Any]:
    statuses = Counter(member_status(record, member) for member in record.members.values())
    missing = record.target_size - len(record.members)
    statuses[""] += max(0, missing) if record.deletion is None else 0
    shown: dict[str, Any] = {
        "isStable": stable,
        "versionTarget": {"isReached": stable},
        "allInstancesConfig": {"effective": True},
        "stateful": {"hasStatefulConfig": False},
        "currentInstanceStatuses": {key: statuses[status] for status, key in COUNTERS.items()},
    }
    if record.bulk:
        bulk: dict[str, Any] = {"inProgress": record.in_progress}
        if record.last_check_at is not None:
            check: dict[str, Any] = {"timestamp": timestamp(record.last_check_at)}
            if record.last_error is not None:
                check["error"] = {"errors": [record.last_error]}
            bulk["lastProgressCheck"] = check
        shown["bulkInstanceOperation"] = bulk
    if record.topology and record.topology_state:
        details: dict[str, Any] = {}
        if record.topology_at is not None:
            details["timestamp"] = timestamp(record.topology_at)
        if record.topology_error:
            error = {"code": "INTERNAL_ERROR", "message": record.topology_error}
            details["error"] = {"errors": [error]}
        shown["appliedAcceleratorTopologies"] = [
            {
                "acceleratorTopology": record.topology, "state": record.topology_state,
                "stateDetails": details,
            }
        ]  # fmt: skip
    return shown


def member_status(record: Group, member: Member) -> str:
    if member.vm is not None:
        return member.vm.status
    waits = record.bulk and record.in_progress and record.model == "FLEX_START"
    return "PENDING" if waits and member.action == "CREATING" else ""


def _template(record: Group) -> str:
    scope, name = record.template
    return link(record.project, f"{scope}/instanceTemplates/{name}")


def managed_instance(record: Group, member: Member) -> dict[str, Any]:
    vm = member.vm
    scope = f"zones/{record.zone or record.zones[0]}"
    shown: dict[str, Any] = {
        "name": member.name,
        "instance": link(record.project, f"{scope}/instances/{member.name}"),
        "currentAction": member.action,
        "targetStatus": "RUNNING",
        "version": {"instanceTemplate": _template(record)},
    }
    status = member_status(record, member)
    if status:
        shown["instanceStatus"] = status
    if vm is not None:
        shown["id"] = str(vm.number)
        if vm.terminates_at is not None:
            shown["scheduling"] = {"terminationTimestamp": timestamp(vm.terminates_at)}
    if member.errors:
        shown["lastAttempt"] = {"errors": {"errors": member.errors}}
    return shown


def listed_error(
    record: Group, member: Member, error: dict[str, Any], at: datetime
) -> dict[str, Any]:
    scope = f"zones/{record.zone or record.zones[0]}"
    return {
        "error": {"code": error["code"], "message": error["message"]},
        "instanceActionDetails": {
            "action": "CREATING",
            "instance": link(record.project, f"{scope}/instances/{member.name}"),
            "version": {"instanceTemplate": _template(record)},
        },
        "timestamp": timestamp(at),
    }  # fmt: skip
