"""Resources of the emulated Compute Engine without TPUs: addresses, disks, firewall rules, and
instances and managed groups of other machine types. What `tpu deploy server` and `tpu cost project`
use of them, from https://cloud.google.com/compute/docs/reference/rest/v1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tpufleet.model.tpu import tpu_zones
from tpufleet_testbed.compute_engine import catalog, validation
from tpufleet_testbed.compute_engine.api_errors import (
    ErrorBody,
    call_error,
    invalid,
    invalid_field,
    required,
)
from tpufleet_testbed.compute_engine.calls import Body, Call
from tpufleet_testbed.compute_engine.engine import ComputeEngine

# Of machine types: CPUs and MB of memory (cloud.google.com/compute/docs/machine-resource).
MACHINE_TYPES = {
    "e2-micro": (2, 1024), "e2-small": (2, 2048), "e2-medium": (2, 4096),
    "n1-highcpu-2": (2, 1843), "n1-standard-1": (1, 3840), "n1-standard-2": (2, 7680),
    "n2-highcpu-2": (2, 2048), "n2-standard-8": (8, 32768), "t2a-standard-1": (1, 4096),
}  # fmt: skip
# Zones for TPUs without other customers' VMs lack the newer families.
NOT_IN_REGION = {"us-central2": ("e2-", "t2a-")}
# What insert requires of each kind, beside a name.
REQUIRED = {
    "addresses": (),
    "disks": (),
    "firewalls": (),
    "instanceGroupManagers": ("instanceTemplate", "targetSize"),
    "instances": ("machineType", "disks", "networkInterfaces"),
}
SCOPES = {
    "addresses": "regions", "disks": "zones", "firewalls": "global",
    "instanceGroupManagers": "zones", "instances": "zones",
}  # fmt: skip

# Of the network `default` of every project (cloud.google.com/firewall/docs/firewalls).
ALLOW_INTERNAL: Body = {
    "name": "default-allow-internal",
    "network": "projects/p/global/networks/default",
    "direction": "INGRESS",
    "sourceRanges": ["10.128.0.0/9"],
    "allowed": [{"IPProtocol": "tcp", "ports": ["0-65535"]}, {"IPProtocol": "icmp"}],
}


@dataclass(slots=True)
class PlainState:
    resources: dict[tuple[str, str, str], Body] = field(default_factory=dict)  # scope, kind, name
    guest_attributes: dict[tuple[str, str], str] = field(default_factory=dict)  # VM, path
    default_firewalls: list[Body] = field(default_factory=lambda: [dict(ALLOW_INTERNAL)])
    address: str = ""  # that is reserved; empty: one of 203.0.113.0/24
    denied: bool = False
    # Kinds whose creation is accepted and then fails, with the message: no quota, no capacity.
    failing: dict[str, str] = field(default_factory=dict)


class PlainResources:
    """`boot` is called with each instance that has started."""

    def __init__(self, engine: ComputeEngine) -> None:
        self._engine, self.state = engine, PlainState()
        self.boot: Callable[[Body], None] = lambda instance: None
        # What a VM wrote: by its name, and namespace/key.
        self.guest_attribute: Callable[[str, str], str | None] = lambda name, path: (
            self.state.guest_attributes.get((name, path))
        )
        self.started: list[Body] = []  # instances that are not booted yet

    def routes(self) -> dict[str, Callable[[Call], Body]]:
        """But listings, which hold resources of TPUs too."""
        own = {"insert": self._insert, "get": self._find, "delete": self._delete}
        instances = {
            "setMetadata": self._set_metadata, "setMachineType": self._set_machine_type,
            "start": self._start, "stop": self._stop,
            "getGuestAttributes": self._guest_attributes,
        }  # fmt: skip
        return {
            **{f"{kind}.{verb}": handle for kind in SCOPES for verb, handle in own.items()},
            **{f"instances.{verb}": handle for verb, handle in instances.items()},
            "firewalls.patch": self._patch_firewall,
        }

    def items(self, kind: str) -> list[tuple[str, Body]]:
        """By scope."""
        found = [(key[0], resource) for key, resource in self.state.resources.items()
                 if key[1] == kind]  # fmt: skip
        if kind == "firewalls":
            found += [("global", rule) for rule in self.state.default_firewalls]
        if kind == "subnetworks":  # auto mode: cloud.google.com/vpc/docs/subnets#ip-ranges
            regions = sorted(catalog.regions(), key=lambda region: region != "us-central1")
            for number, region in enumerate(regions):
                ip_range = f"10.{128 + number}.0.0/20"
                found.append((f"regions/{region}", {"name": "default", "ipCidrRange": ip_range}))
        return found

    def has(self, call: Call, name: str = "") -> bool:
        return (call.scope, call.kind, name or call.name) in self.state.resources

    def machine_types(self, scope: str) -> list[Body]:
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

    def _insert(self, call: Call) -> Body:
        body, kind, name = call.body, call.kind, validation.name_of(call.body)
        self._check(call)
        if self.has(call, name):
            raise call_error("exists", target=call.target(name))
        resource = {"kind": f"compute#{kind.removesuffix('s')}", **body}
        number = self._engine.number()
        if kind == "addresses":
            address = self.state.address or f"203.0.113.{number % 250}"
            resource |= {"address": address, "status": "RESERVED"}
        if kind == "instances":
            resource["status"] = "RUNNING"
            resource["metadata"] = {**body.get("metadata", {}), "fingerprint": f"print-{number}"}
            resource["networkInterfaces"] = [
                {**each, "networkIP": f"10.128.0.{number % 250}"}
                for each in body["networkInterfaces"]
            ]
        if message := self.state.failing.get(kind):
            error = {"code": "RESOURCE_EXHAUSTED", "message": message}
            return self._operation(call, "insert", name, [error])
        self.state.resources[call.scope, kind, name] = resource
        if kind == "instances":
            self._mark_users()
            self.started.append(resource)
        return self._operation(call, "insert", name)

    def _operation(
        self, call: Call, verb: str, name: str, errors: Sequence[ErrorBody] = ()
    ) -> Body:
        """As its caller sees it: it is done when it is read again."""
        begun = self._engine.operations.begin(
            call.project, call.scope, verb, f"{call.kind}/{name}", self._engine.number()
        )
        answer = dict(begun)
        self._engine.operations.finish(begun, errors)
        return answer

    def _find(self, call: Call) -> Body:
        if not self.has(call):
            raise call_error("not-found", target=call.target())
        return self.state.resources[call.scope, call.kind, call.name]

    def _delete(self, call: Call) -> Body:
        self._find(call)
        for (_, kind, name), vm in self.state.resources.items():
            sources = [disk.get("source", "") for disk in vm.get("disks", ())]
            if call.kind == "disks" and kind == "instances" and call.name in map(_last, sources):
                raise call_error("in-use", kind="disk", target=call.name, user=name)
        del self.state.resources[call.scope, call.kind, call.name]
        self._mark_users()
        return self._operation(call, "delete", call.name)

    def _patch_firewall(self, call: Call) -> Body:
        self._find(call).update(call.body)
        return self._operation(call, "patch", call.name)

    def _set_metadata(self, call: Call) -> Body:
        vm = self._find(call)
        if call.body.get("fingerprint") != vm["metadata"]["fingerprint"]:
            raise call_error("stale-fingerprint")
        vm["metadata"] = {**call.body, "fingerprint": f"print-{self._engine.number()}"}
        return self._operation(call, "setMetadata", call.name)

    def _set_machine_type(self, call: Call) -> Body:
        vm = self._find(call)
        if vm["status"] != "TERMINATED":
            raise invalid("Machine type can only be changed on a stopped instance.")
        self._check_machine_type(call)
        vm["machineType"] = call.body["machineType"]
        return self._operation(call, "setMachineType", call.name)

    def _stop(self, call: Call) -> Body:
        self._find(call)["status"] = "TERMINATED"
        return self._operation(call, "stop", call.name)

    def _start(self, call: Call) -> Body:
        vm = self._find(call)
        if vm["status"] != "RUNNING":
            vm["status"] = "RUNNING"
            self.started.append(vm)
        return self._operation(call, "start", call.name)

    def _guest_attributes(self, call: Call) -> Body:
        path = call.query.get("queryPath", "")
        value = self.guest_attribute(call.name, path)
        if value is None:
            raise call_error("not-found", target=path)
        namespace, _, key = path.partition("/")
        item = {"namespace": namespace, "key": key, "value": value}
        return {
            "kind": "compute#guestAttributes", "queryPath": path, "queryValue": {"items": [item]},
        }  # fmt: skip

    def _check(self, call: Call) -> None:
        body, kind = call.body, call.kind
        for name in REQUIRED[kind]:
            if not body.get(name):
                raise required(f"resource.{name}")
        if call.scope.partition("/")[0] != SCOPES[kind]:
            raise invalid(f"{kind} are not in {call.scope}")
        if kind == "firewalls" and not body.get("allowed") and not body.get("denied"):
            raise invalid_field("resource", "", "allowed or denied must be specified")
        if kind == "firewalls" and (network := str(body.get("network", ""))):
            validation.reference("resource.network", network, "networks")
            # Rules of a shared VPC are in its host project.
            if f"projects/{call.project}/" not in network and "projects/" in network:
                problem = "Cross project referencing is not allowed for this resource."
                raise invalid_field("resource.network", network, problem)
        if kind == "instances":
            self._check_instance(call)

    def _check_machine_type(self, call: Call) -> None:
        url, name = str(call.body.get("machineType")), "resource.machineType"
        scope, machine = validation.reference(name, url, "machineTypes")
        known = [each["name"] for each in self.machine_types(scope)]
        if scope != call.scope or machine not in known:
            raise invalid_field(name, url, "The referenced resource does not exist.")

    def _check_instance(self, call: Call) -> None:
        self._check_machine_type(call)
        body = call.body
        if sum(bool(disk.get("boot")) for disk in body["disks"]) != 1:
            raise invalid_field("resource.disks", "", "exactly one boot disk is required")
        for disk in body["disks"]:
            source = str(disk.get("source", ""))
            if source and (call.scope, "disks", _last(source)) not in self.state.resources:
                raise call_error("not-found", target=source)
        validation.metadata(body.get("metadata", {}).get("items", []), "resource.metadata")
        reserved = [address["address"] for _, address in self.items("addresses")]
        for index, interface in enumerate(body["networkInterfaces"]):
            for name in ("network", "subnetwork"):
                if interface.get(name):
                    where = f"resource.networkInterfaces[{index}].{name}"
                    validation.reference(where, interface[name], f"{name}s")
            for access in interface.get("accessConfigs", ()):
                if access.get("natIP") and access["natIP"] not in reserved:
                    raise invalid_field("natIP", access["natIP"], "is not reserved")

    def _mark_users(self) -> None:
        """Addresses and disks name the instances that use them."""
        used: dict[str, list[str]] = {}
        for scope, vm in self.items("instances"):
            names = [str(disk.get("source", "")) for disk in vm["disks"]]
            for interface in vm["networkInterfaces"]:
                names += [each.get("natIP", "") for each in interface.get("accessConfigs", ())]
            for each in names:
                used.setdefault(_last(each), []).append(f"{scope}/instances/{vm['name']}")
        for _, disk in self.items("disks"):
            disk["users"] = used.get(disk["name"], [])
        for _, address in self.items("addresses"):
            address["users"] = used.get(address["address"], [])
            address["status"] = "IN_USE" if address["users"] else "RESERVED"


def _last(url: str) -> str:
    return url.rpartition("/")[2]
