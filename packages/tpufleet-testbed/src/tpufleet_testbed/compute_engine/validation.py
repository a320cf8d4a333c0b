"""Rejects requests that Compute Engine rejects: names, URLs, templates, policies, groups."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any

from tpufleet_testbed.cloud_tpu.node_validation import (
    LABEL_KEY,
    LABEL_VALUE,
    MAX_LABELS,
    MAX_TAGS,
    METADATA_BYTES,
    METADATA_KEY,
    METADATA_VALUE_BYTES,
    TAG,
)
from tpufleet_testbed.compute_engine import catalog
from tpufleet_testbed.compute_engine.api_errors import (
    RestError,
    call_error,
    invalid,
    invalid_field,
    required,
)
from tpufleet_testbed.compute_engine.catalog import Machine
from tpufleet_testbed.compute_engine.fault_plan import Switches

NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
# What takes the URL of a resource: whole, from projects on, or from global, regions or zones on.
URL = re.compile(
    r"(?:https://(?:www\.googleapis\.com|compute\.googleapis\.com)/compute/(?:v1|beta)/)?"
    r"(?:projects/(?P<project>[^/]+)/)?(?P<scope>global|(?:zones|regions)/[^/]+)/(?P<kind>\w+)/"
    r"(?P<name>[^/]+(?:/[^/]+)?)"
)
UNSUPPORTED = "Unsupported TPU configuration"
MODELS = ("STANDARD", "SPOT", "FLEX_START", "RESERVATION_BOUND")
_DURATION = catalog.LIMITS["run_duration"]


def name_of(body: Mapping[str, Any], longest: int = 63) -> str:
    name = str(body.get("name", ""))
    if not name:
        raise required("resource.name")
    if not NAME.fullmatch(name) or len(name) > longest:
        pattern = "(?:[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?)"
        raise invalid_field(
            "resource.name", name, f"Must be a match of regex '{pattern}'"
        )  # fmt: skip
    return name


def request_id(text: str) -> str:
    try:
        number = uuid.UUID(text)
    except ValueError:
        raise invalid_field("requestId", text, "Must be a UUID.") from None
    if not number.int:
        raise invalid_field("requestId", text, "The zero UUID is not supported.")
    return str(number)


def reference(field: str, url: str, kind: str) -> tuple[str, str]:
    """Scope and name of the resource that a URL names."""
    match = URL.fullmatch(url)
    if match is None or match["kind"] != kind:
        raise invalid_field(field, url, "The URL is malformed.")
    return match["scope"], match["name"]


def workload_policy(body: Mapping[str, Any], switches: Switches) -> dict[str, Any]:
    """The policy with its defaults."""
    policy = body.get("workloadPolicy")
    if policy is None:
        raise invalid(
            "Resource policy must have one of [WorkloadPolicy, GroupPlacementPolicy, "
            "InstanceSchedulePolicy, SnapshotSchedulePolicy]"
        )
    field = "resource.workloadPolicy"
    kind = policy.get("type")
    if kind not in ("HIGH_AVAILABILITY", "HIGH_THROUGHPUT"):
        raise invalid_field(f"{field}.type", kind) if kind else required(f"{field}.type")
    topology = str(policy.get("acceleratorTopology", ""))
    distance = policy.get("maxTopologyDistance")
    if topology and distance:
        raise invalid(
            "Cannot specify both acceleratorTopology and maxTopologyDistance in a workload policy."
        )
    if distance not in (None, "CLUSTER", "BLOCK", "SUBBLOCK"):
        raise invalid_field(f"{field}.maxTopologyDistance", distance)
    if kind == "HIGH_AVAILABILITY" and (topology or distance):
        raise invalid_field(f"{field}.type", kind, "A topology requires HIGH_THROUGHPUT.")
    if topology and not catalog.chips_of(topology):
        raise invalid_field(f"{field}.acceleratorTopology", topology)
    if topology and switches.bad_topology == "policy":
        known = any(topology in each.topologies for each in catalog.machines().values())
        if not known:
            raise invalid(UNSUPPORTED)
    mode = policy.get("acceleratorTopologyMode")
    if mode not in (None, "AUTO_CONNECT", "PROVISION_ONLY") or (mode and not topology):
        raise invalid_field(f"{field}.acceleratorTopologyMode", mode)
    defaults = {"acceleratorTopologyMode": "AUTO_CONNECT"} if topology else {}
    return {**body, "workloadPolicy": {**defaults, **policy}}


def machine_of(text: str, zone: str, field: str) -> Machine | None:
    """Of the URL that an instance has. None: no machine for TPUs."""
    scope, name = reference(field, text, "machineTypes")
    machine = catalog.machines().get(name)
    if machine is None:
        return None
    if scope != f"zones/{zone}" or zone not in machine.zones:
        raise invalid_field(
            field, text, f"Machine type with name '{name}' does not exist in zone '{zone}'."
        )
    return machine


def template(body: Mapping[str, Any], scope: str, switches: Switches) -> None:
    properties = body.get("properties")
    field = "resource.properties"
    if not properties:
        raise required(field)
    machine = str(properties.get("machineType", ""))
    if not machine:
        raise required(f"{field}.machineType")
    if "/" in machine:
        raise invalid_field(
            f"{field}.machineType", machine, "Must be the name of a machine type, not a URL."
        )
    for index, interface in enumerate(properties.get("networkInterfaces") or []):
        subnetwork = interface.get("subnetwork", "")
        if scope == "global" and subnetwork and "/" not in subnetwork:
            raise invalid_field(
                f"{field}.networkInterfaces[{index}].subnetwork", subnetwork,
                "The URL is malformed.",
            )  # fmt: skip
    vm_properties(properties, field, catalog.machines().get(machine))
    if machine in catalog.machines() and switches.bad_scheduling == "call":
        scheduling(properties, f"{field}.scheduling")


def vm_properties(properties: Mapping[str, Any], field: str, machine: Machine | None) -> None:
    """Of a template, or of an instance."""
    disks = properties.get("disks") or []
    if sum(bool(disk.get("boot")) for disk in disks) != 1:
        raise invalid_field(f"{field}.disks", len(disks), "Exactly one boot disk is required.")
    for index, disk in enumerate(disks):
        parameters = disk.get("initializeParams") or {}
        image = parameters.get("sourceImage", "")
        if disk.get("boot") and not image and not disk.get("source"):
            raise required(f"{field}.disks[{index}].initializeParams.sourceImage")
        if image and "/" not in image:
            raise invalid_field(
                f"{field}.disks[{index}].initializeParams.sourceImage", image,
                "The URL is malformed.",
            )  # fmt: skip
        size = parameters.get("diskSizeGb")
        if size is not None and int(size) < catalog.IMAGES["disk_size_gb"]:
            raise invalid_field(
                f"{field}.disks[{index}].initializeParams.diskSizeGb", size,
                "The disk is smaller than the image.",
            )  # fmt: skip
    if not properties.get("networkInterfaces"):
        raise required(f"{field}.networkInterfaces")
    labels(properties.get("labels") or {}, f"{field}.labels")
    _tags((properties.get("tags") or {}).get("items") or [], f"{field}.tags")
    metadata((properties.get("metadata") or {}).get("items") or [], f"{field}.metadata")
    if machine is not None and properties.get("guestAccelerators"):
        raise invalid_field(
            f"{field}.guestAccelerators", machine.name,
            "The accelerators of this machine type come with it.",
        )  # fmt: skip


def labels(found: Mapping[str, Any], field: str) -> None:
    for key, value in found.items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(str(value)):
            raise invalid_field(field, f"{key}={value}")
    if len(found) > MAX_LABELS:
        raise invalid_field(field, len(found), f"At most {MAX_LABELS} labels.")


def _tags(found: list[Any], field: str) -> None:
    if len(found) > MAX_TAGS or not all(TAG.fullmatch(str(tag)) for tag in found):
        raise invalid_field(f"{field}.items", found)


def metadata(items: list[Any], field: str) -> None:
    keys = [str(item.get("key", "")) for item in items]
    sizes = [len(str(item.get("value", "")).encode()) for item in items]
    if not all(METADATA_KEY.fullmatch(key) for key in keys) or len(set(keys)) < len(keys):
        raise invalid_field(f"{field}.items", ", ".join(keys))
    if any(size > METADATA_VALUE_BYTES for size in sizes) or sum(sizes) > METADATA_BYTES:
        raise invalid_field(field, sum(sizes), "Too large.")


def model_of(properties: Mapping[str, Any]) -> str:
    found = properties.get("scheduling") or {}
    if found.get("provisioningModel"):
        return str(found["provisioningModel"])
    return "SPOT" if found.get("preemptible") else "STANDARD"


def scheduling(properties: Mapping[str, Any], field: str) -> None:
    """Of a VM with TPUs."""
    found, model = properties.get("scheduling") or {}, model_of(properties)
    if model not in MODELS:
        raise invalid_field(f"{field}.provisioningModel", model)
    if found.get("onHostMaintenance") != "TERMINATE":
        raise invalid_field(
            f"{field}.onHostMaintenance", found.get("onHostMaintenance", "MIGRATE"),
            "VMs with accelerators do not support live migration; use TERMINATE.",
        )  # fmt: skip
    action = found.get("instanceTerminationAction")
    if action not in (None, "STOP", "DELETE"):
        raise invalid_field(f"{field}.instanceTerminationAction", action)
    if model == "SPOT" and found.get("automaticRestart"):
        raise invalid("Scheduling.automaticRestart cannot be true for Spot VMs.")
    seconds = (found.get("maxRunDuration") or {}).get("seconds")
    if seconds is not None:
        flex = model == "FLEX_START"
        shortest, longest = catalog.LIMITS["flex_run_duration"] if flex else _DURATION
        if not shortest <= int(seconds) <= longest:
            raise invalid_field(
                f"{field}.maxRunDuration", f"{seconds}s", f"{shortest} to {longest} seconds."
            )
        if action is None:
            raise required(f"{field}.instanceTerminationAction")
    affinity = properties.get("reservationAffinity") or {}
    kind = affinity.get("consumeReservationType")
    if model == "FLEX_START":
        if seconds is None:
            raise required(f"{field}.maxRunDuration")
        if action != "DELETE":
            raise invalid_field(f"{field}.instanceTerminationAction", action, "Must be DELETE.")
        if kind not in (None, "NO_RESERVATION"):
            raise invalid_field(f"{field}.provisioningModel", model, "Cannot use reservations.")
    if model == "RESERVATION_BOUND":
        if kind != "SPECIFIC_RESERVATION" or not affinity.get("values"):
            raise invalid_field(
                f"{field}.provisioningModel", model, "Requires a specific reservation."
            )
        if action != "DELETE":
            raise invalid_field(f"{field}.instanceTerminationAction", action, "Must be DELETE.")
    timeout = found.get("hostErrorTimeoutSeconds")
    if timeout is not None:
        shortest, longest = catalog.LIMITS["host_error_timeout"]
        if not shortest <= int(timeout) <= longest or int(timeout) % 30:
            raise invalid_field(f"{field}.hostErrorTimeoutSeconds", timeout)


def group(
    body: Mapping[str, Any],
    machine: Machine | None,
    properties: Mapping[str, Any],
    policy: Mapping[str, Any] | None,
    switches: Switches,
) -> None:
    """What depends on the template and the policy."""
    bulk = (body.get("targetSizePolicy") or {}).get("mode") == "BULK"
    topology = (policy or {}).get("acceleratorTopology", "")
    model = model_of(properties)
    lifecycle = body.get("instanceLifecyclePolicy") or {}
    if topology and not bulk and switches.topology_needs_bulk:
        raise invalid("MIGs with TPU accelerator topology require BULK mode in target size policy")
    if topology and machine is None:
        raise invalid("An accelerator topology requires a machine type with TPUs.")
    if bulk:
        if model not in switches.bulk_models and switches.bulk_refusal == "call":
            raise invalid(f"BULK mode in target size policy does not support {model} instances.")
        if model == "FLEX_START" and lifecycle.get("defaultActionOnFailure") != "DO_NOTHING":
            raise invalid(
                "Repairs must be disabled (defaultActionOnFailure: DO_NOTHING) for MIGs with "
                "FLEX_START instances in BULK mode."
            )
        for name in ("instanceFlexibilityPolicy", "standbyPolicy"):
            if body.get(name):
                raise invalid_field(f"resource.{name}", "", "Not supported in BULK mode.")
        if len(body.get("versions") or []) > 1:
            raise invalid_field("resource.versions", 2, "Canary updates need INDIVIDUAL mode.")
        shape = (body.get("distributionPolicy") or {}).get("targetShape")
        if body.get("_regional") and shape != "ANY_SINGLE_ZONE":
            raise invalid_field(
                "resource.distributionPolicy.targetShape", shape,
                "BULK mode requires ANY_SINGLE_ZONE.",
            )  # fmt: skip
    if topology and machine is not None and switches.bad_topology == "call":
        chips = int(body.get("targetSize", 0)) * machine.chips
        if topology not in machine.topologies or chips not in (0, catalog.chips_of(topology)):
            raise invalid(UNSUPPORTED)


def group_fields(body: Mapping[str, Any]) -> None:
    name_of(body, catalog.LIMITS["group_name"])
    base = str(body.get("baseInstanceName", body["name"]))
    stem = base.partition("-#")[0]
    if not NAME.fullmatch(stem) or len(base) > catalog.LIMITS["base_instance_name"]:
        raise invalid_field("resource.baseInstanceName", base)
    if "targetSize" not in body:
        raise required("resource.targetSize")
    size(int(body["targetSize"]), "resource.targetSize")
    mode = (body.get("targetSizePolicy") or {}).get("mode")
    if mode not in (None, "BULK", "INDIVIDUAL"):
        raise invalid_field("resource.targetSizePolicy.mode", mode)
    lifecycle = body.get("instanceLifecyclePolicy") or {}
    action = lifecycle.get("defaultActionOnFailure")
    if action not in (None, "REPAIR", "DO_NOTHING"):
        raise invalid_field("resource.instanceLifecyclePolicy.defaultActionOnFailure", action)
    results = body.get("listManagedInstancesResults")
    if results not in (None, "PAGELESS", "PAGINATED"):
        raise invalid_field("resource.listManagedInstancesResults", results)


def size(wanted: int, field: str) -> None:
    if not 0 <= wanted <= catalog.LIMITS["group_vms"]:
        raise invalid_field(field, wanted)


def missing(project: str, scope: str, kind: str, name: str) -> RestError:
    return call_error("not-found", target=f"projects/{project}/{scope}/{kind}/{name}")
