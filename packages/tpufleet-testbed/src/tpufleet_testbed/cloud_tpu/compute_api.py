"""The Compute Engine API of the emulated project, as far as `tpu deploy server` and `tpu cost
project` use it: addresses, disks, firewall rules, instances, managed groups, machine types,
operations and guest attributes. Written from https://cloud.google.com/compute/docs/reference/rest/v1."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tpufleet.model.tpu import tpu_zones

# RFC 1035, as all of these resources require.
_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
_COLLECTION = re.compile(
    r"compute/v1/projects/(?P<project>[^/]+)/(?P<scope>global|(?:zones|regions)/[^/]+)/"
    r"(?P<kind>addresses|disks|firewalls|instanceGroupManagers|instances|operations)"
    r"(?:/(?P<name>[^/]+)(?:/(?P<verb>getGuestAttributes|setMachineType|setMetadata|start|stop|wait))?)?"
)
_AGGREGATED = re.compile(r"compute/v1/projects/[^/]+/aggregated/(?P<kind>\w+)")
# What Compute Engine takes where it wants the URL of a resource: whole, or from projects, or from
# global, regions or zones. A name alone is malformed.
_URL = re.compile(
    r"(?:https://(?:www\.googleapis\.com|compute\.googleapis\.com)/compute/(?:v1|beta)/)?"
    r"(?:projects/[^/]+/)?(?P<scope>global|(?:zones|regions)/[^/]+)/(?P<kind>\w+)/(?P<name>[^/]+)"
)
# Of machine types: CPUs and MB of memory (cloud.google.com/compute/docs/machine-resource).
MACHINE_TYPES = {
    "e2-micro": (2, 1024), "e2-small": (2, 2048), "e2-medium": (2, 4096),
    "n1-highcpu-2": (2, 1843), "n1-standard-1": (1, 3840), "n1-standard-2": (2, 7680),
    "n2-highcpu-2": (2, 2048), "n2-standard-8": (8, 32768), "t2a-standard-1": (1, 4096),
}  # fmt: skip
# Zones for TPUs without other customers' VMs lack the newer families.
NOT_IN_REGION = {"us-central2": ("e2-", "t2a-")}
# What insert requires of each kind; a missing field is answered with 400.
REQUIRED = {
    "addresses": ("name",),
    "disks": ("name",),
    "firewalls": ("name",),
    "instanceGroupManagers": ("name", "instanceTemplate", "targetSize"),
    "instances": ("name", "machineType", "disks", "networkInterfaces"),
}
SCOPES = {
    "addresses": "regions", "disks": "zones", "firewalls": "global",
    "instanceGroupManagers": "zones", "instances": "zones",
}  # fmt: skip
MAX_METADATA_BYTES = 512 * 1024  # of all items of an instance; 256 kB of one value

# Of the network `default` of every project (cloud.google.com/firewall/docs/firewalls).
ALLOW_INTERNAL: dict[str, Any] = {
    "name": "default-allow-internal",
    "network": "projects/p/global/networks/default",
    "direction": "INGRESS",
    "sourceRanges": ["10.128.0.0/9"],
    "allowed": [{"IPProtocol": "tcp", "ports": ["0-65535"]}, {"IPProtocol": "icmp"}],
}

Reply = tuple[int, dict[str, Any]]


@dataclass(slots=True)
class ComputeState:
    resources: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    operations: dict[str, dict[str, Any]] = field(default_factory=dict)
    guest_attributes: dict[tuple[str, str], str] = field(default_factory=dict)  # VM, path
    default_firewalls: list[dict[str, Any]] = field(default_factory=lambda: [dict(ALLOW_INTERNAL)])
    address: str = ""  # that is reserved; empty: one of 203.0.113.0/24
    denied: bool = False
    # Kinds whose creation is accepted and then fails, with the message: no quota, no capacity.
    failing: dict[str, str] = field(default_factory=dict)
    pending_polls: int = 1  # how often an operation is RUNNING before it is DONE


class ComputeApi:
    """`boot` is called with each new instance, in the caller's thread."""

    def __init__(self, state: ComputeState | None = None) -> None:
        self.state = state or ComputeState()
        self.boot: Callable[[dict[str, Any]], None] = lambda instance: None
        # What a VM wrote: by its name, and namespace/key.
        self.guest_attribute: Callable[[str, str], str | None] = lambda name, path: (
            self.state.guest_attributes.get((name, path))
        )
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def answer(
        self, method: str, path: str, query: dict[str, list[str]], body: dict[str, Any]
    ) -> Reply | None:
        """None: not a path of this API."""
        aggregated = _AGGREGATED.fullmatch(path)
        match = _COLLECTION.fullmatch(path)
        if match is None and aggregated is None:
            return None
        if self.state.denied:
            return _error(403, "Required 'compute.instances.create' permission", "forbidden")
        if match is None:
            assert aggregated is not None
            with self._lock:
                return 200, {"items": self._aggregated(aggregated["kind"])}
        scope, kind, name = match["scope"], match["kind"], match["name"] or ""
        with self._lock:
            if kind == "operations":
                return self._operation(name)
            if match["verb"] == "getGuestAttributes":
                return self._guest_attributes(name, query.get("queryPath", [""])[0])
            if method == "POST" and not name:
                return self._insert(scope, kind, body, match["project"])
            if method == "GET" and not name:
                return 200, {"items": self._items(scope, kind)}
            known = self.state.resources.get((scope, kind, name))
            if known is None:
                what = f"projects/{match['project']}/{scope}/{kind}/{name}"
                return _error(404, f"The resource '{what}' was not found", "notFound")
            if method in ("PATCH", "POST"):
                return self._change(scope, kind, name, match["verb"] or "", body)
            return self._delete(scope, kind, name) if method == "DELETE" else (200, known)

    # What another API, which shares its paths with this one, adds to its own.
    def items(self, scope: str, kind: str) -> list[dict[str, Any]]:
        return [] if self.state.denied else self._items(scope, kind)

    def all_items(self, kind: str) -> list[tuple[str, dict[str, Any]]]:
        return [
            (scope, resource) for (scope, what, _), resource in self.state.resources.items()
            if what == kind
        ]  # fmt: skip

    def has(self, scope: str, kind: str, name: str) -> bool:
        return (scope, kind, name) in self.state.resources

    def has_operation(self, name: str) -> bool:
        return name in self.state.operations

    def _aggregated(self, kind: str) -> dict[str, Any]:
        """By scope, with a warning where there is none."""
        scopes: dict[str, Any] = {"global": {"warning": {"code": "NO_RESULTS_ON_PAGE"}}}
        for (scope, what, _), resource in self.state.resources.items():
            if what == kind:
                scopes.setdefault(scope, {kind: []})[kind].append(resource)
        return scopes

    def _mark_users(self) -> None:
        """Addresses and disks name the instances that use them."""
        used: dict[str, list[str]] = {}
        for (scope, kind, name), vm in self.state.resources.items():
            if kind == "instances":
                names = [str(disk.get("source", "")) for disk in vm["disks"]]
                for interface in vm["networkInterfaces"]:
                    names += [each.get("natIP", "") for each in interface.get("accessConfigs", ())]
                for each in names:
                    used.setdefault(each.rpartition("/")[2], []).append(f"{scope}/{kind}/{name}")
        for (_, kind, name), resource in self.state.resources.items():
            if kind == "disks":
                resource["users"] = used.get(name, [])
            elif kind == "addresses":
                resource["users"] = used.get(resource["address"], [])
                resource["status"] = "IN_USE" if resource["users"] else "RESERVED"

    def machine_types(self, scope: str) -> list[dict[str, Any]]:
        zone = scope.partition("/")[2]
        lacking = NOT_IN_REGION.get(zone.rpartition("-")[0], ())
        return [
            {
                "kind": "compute#machineType", "name": each, "zone": zone, "guestCpus": cpus,
                "memoryMb": memory, "architecture": "ARM64" if "a-" in each else "X86_64",
            }
            for each, (cpus, memory) in MACHINE_TYPES.items()
            if not each.startswith(lacking or "-") and zone in tpu_zones.zones()
        ]  # fmt: skip

    def _change(self, scope: str, kind: str, name: str, verb: str, body: dict[str, Any]) -> Reply:
        known = self.state.resources[scope, kind, name]
        if kind == "firewalls":
            known |= body
        elif verb == "setMetadata":
            if body.get("fingerprint") != known["metadata"]["fingerprint"]:
                message = "Supplied fingerprint does not match current metadata fingerprint."
                return _error(412, message, "conditionNotMet")
            known["metadata"] = {**body, "fingerprint": f"print-{next(self._numbers)}"}
        elif verb == "setMachineType":
            if known["status"] != "TERMINATED":
                message = "Machine type can only be changed on a stopped instance."
                return _error(400, message, "invalid")
            if problem := self._invalid_machine_type(scope, str(body.get("machineType"))):
                return _error(400, problem, "invalid")
            known["machineType"] = body["machineType"]
        elif verb == "stop":
            known["status"] = "TERMINATED"
        elif verb == "start":
            was, known["status"] = known["status"], "RUNNING"
            if was != "RUNNING":
                self.boot(known)
        return 200, self._new_operation(verb or "patch", scope, kind, name)

    def _invalid_machine_type(self, scope: str, url: str) -> str:
        problem = f"Invalid value for field 'resource.machineType': '{url}'."
        parts = _URL.fullmatch(url)
        if parts is None or parts["kind"] != "machineTypes":
            return f"{problem} The URL is malformed."
        known = [each["name"] for each in self.machine_types(parts["scope"])]
        if parts["scope"] != scope or parts["name"] not in known:
            return f"{problem} The referenced resource does not exist."
        return ""

    def _items(self, scope: str, kind: str) -> list[dict[str, Any]]:
        known = [
            resource for (where, what, _), resource in self.state.resources.items()
            if (where, what) == (scope, kind)
        ]  # fmt: skip
        return [*known, *(self.state.default_firewalls if kind == "firewalls" else ())]

    def _insert(self, scope: str, kind: str, body: dict[str, Any], project: str) -> Reply:
        name = str(body.get("name", ""))
        problem = self._invalid(scope, kind, body, name)
        if problem:
            return _error(400, problem, "invalid")
        if (scope, kind, name) in self.state.resources:
            what = f"projects/{project}/{scope}/{kind}/{name}"
            return _error(409, f"The resource '{what}' already exists", "alreadyExists")
        resource = {"kind": f"compute#{kind.removesuffix('s')}", **body}
        number = next(self._numbers)
        if kind == "addresses":
            address = self.state.address or f"203.0.113.{number}"
            resource |= {"address": address, "status": "RESERVED"}
        if kind == "instances":
            resource["status"] = "RUNNING"
            resource["metadata"] = {**body.get("metadata", {}), "fingerprint": f"print-{number}"}
            resource["networkInterfaces"] = [
                {**each, "networkIP": f"10.128.0.{number}"} for each in body["networkInterfaces"]
            ]
        operation = self._new_operation("insert", scope, kind, name)
        if kind in self.state.failing:
            error = {"code": "RESOURCE_EXHAUSTED", "message": self.state.failing[kind]}
            self.state.operations[operation["name"]]["error"] = {"errors": [error]}
            return 200, operation
        self.state.resources[scope, kind, name] = resource
        if kind == "instances":
            self._mark_users()
            self.boot(resource)
        return 200, operation

    def _invalid(self, scope: str, kind: str, body: dict[str, Any], name: str) -> str:
        missing = [each for each in REQUIRED[kind] if not body.get(each)]
        if missing:
            return f"Required field 'resource.{missing[0]}' not specified"
        if not _NAME.fullmatch(name):
            return f"Invalid value for field 'resource.name': '{name}'"
        if scope.partition("/")[0] != SCOPES[kind]:
            return f"{kind} are not in {scope}"
        if kind == "firewalls" and not body.get("allowed") and not body.get("denied"):
            return "Invalid value for field 'resource': allowed or denied must be specified"
        return self._invalid_instance(scope, body) if kind == "instances" else ""

    def _invalid_instance(self, scope: str, body: dict[str, Any]) -> str:
        if problem := self._invalid_machine_type(scope, str(body["machineType"])):
            return problem
        if sum(bool(disk.get("boot")) for disk in body["disks"]) != 1:
            return "Invalid value for field 'resource.disks': exactly one boot disk is required"
        for disk in body["disks"]:
            source = str(disk.get("source", ""))
            if source:
                where = (scope, "disks", source.rpartition("/")[2])
                if where not in self.state.resources:
                    return f"The resource '{source}' was not found"
        items = body.get("metadata", {}).get("items", [])
        values = [str(item.get("value", "")).encode() for item in items]
        if any(len(value) > 256 * 1024 for value in values) or sum(map(len, values)) > (
            MAX_METADATA_BYTES
        ):
            return "Invalid value for field 'resource.metadata': too large"
        reserved = {
            each["address"] for (_, kind, _), each in self.state.resources.items()
            if kind == "addresses"
        }  # fmt: skip
        for index, interface in enumerate(body["networkInterfaces"]):
            for name in ("network", "subnetwork"):
                url = _URL.fullmatch(interface.get(name) or f"global/{name}s/default")
                if url is None or url["kind"] != f"{name}s":
                    field = f"resource.networkInterfaces[{index}].{name}"
                    return (
                        f"Invalid value for field '{field}': '{interface[name]}'. "
                        "The URL is malformed."
                    )
            for access in interface.get("accessConfigs", ()):
                if access.get("natIP") and access["natIP"] not in reserved:
                    return f"Invalid value for field 'natIP': '{access['natIP']}' is not reserved"
        return ""

    def _delete(self, scope: str, kind: str, name: str) -> Reply:
        using = [
            instance["name"]
            for (_, other, _), instance in self.state.resources.items()
            if other == "instances" and kind == "disks"
            and any(str(d.get("source", "")).endswith(f"/{name}") for d in instance["disks"])
        ]  # fmt: skip
        if using:
            return _error(
                400, f"The disk resource '{name}' is already being used by '{using[0]}'",
                "resourceInUseByAnotherResource",
            )  # fmt: skip
        del self.state.resources[scope, kind, name]
        self._mark_users()
        return 200, self._new_operation("delete", scope, kind, name)

    def _new_operation(self, verb: str, scope: str, kind: str, name: str) -> dict[str, Any]:
        number = f"operation-{next(self._numbers)}"
        operation: dict[str, Any] = {
            "kind": "compute#operation", "name": number,
            "operationType": verb, "status": "RUNNING", "targetLink": f"{scope}/{kind}/{name}",
            "polls": self.state.pending_polls,
        }  # fmt: skip
        self.state.operations[number] = operation
        return {key: value for key, value in operation.items() if key != "polls"}

    def _operation(self, name: str) -> Reply:
        operation = self.state.operations.get(name)
        if operation is None:
            return _error(404, f"The resource '{name}' was not found", "notFound")
        operation["polls"] -= 1
        if operation["polls"] <= 0:
            operation["status"] = "DONE"
        return 200, {key: value for key, value in operation.items() if key != "polls"}

    def _guest_attributes(self, name: str, path: str) -> Reply:
        value = self.guest_attribute(name, path)
        if value is None:
            return _error(404, f"The resource '{path}' of type 'Guest Attribute' was not found",
                          "notFound")  # fmt: skip
        namespace, _, key = path.partition("/")
        item = {"namespace": namespace, "key": key, "value": value}
        return 200, {
            "kind": "compute#guestAttributes", "queryPath": path, "queryValue": {"items": [item]},
        }  # fmt: skip


def _error(code: int, message: str, reason: str) -> Reply:
    errors = [{"message": message, "domain": "global", "reason": reason}]
    return code, {"error": {"code": code, "message": message, "errors": errors}}
