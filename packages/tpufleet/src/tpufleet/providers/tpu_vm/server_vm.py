"""A VM in the project that runs the tpufleet server, for operators whose own machine TPU hosts
cannot reach. Made of four resources of the Compute Engine API v1:
https://cloud.google.com/compute/docs/reference/rest/v1"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from tpufleet.errors import (
    BadRequest,
    FleetError,
    PermissionMissing,
    ProviderError,
    ProviderUnavailable,
)
from tpufleet.model.fleet import bootstrap
from tpufleet.model.fleet.bootstrap import BootstrapReport, BootstrapStage
from tpufleet.model.tpu import server_vm_prices
from tpufleet.providers.tpu_vm import naming, preflight_accounts, startup_script
from tpufleet.providers.tpu_vm.google_rest import Answer, GoogleRest

DEFAULT_PORT = 8470
MEMORY_MB = 2048  # enough for a server
IMAGE = "projects/debian-cloud/global/images/family/debian-12"
DISK_TYPE = "pd-balanced"
STATE_DEVICE = "tpufleet-state"  # /dev/disk/by-id/google-tpufleet-state
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
# Of TPU hosts in the VPC: subnets in auto mode are in 10.128.0.0/9.
PRIVATE_RANGES = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
EVERYWHERE = ("0.0.0.0/0",)
PORT, DEPLOYMENT = "tpufleet-port", "tpufleet-deployment"  # metadata
POLL_SECONDS = 1.0
OPERATION_SECONDS = 300.0
READY_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerVmSettings:
    """What is empty becomes what is deployed, or else the default."""

    project: str
    zone: str | None = None
    default_zone: str = ""
    name: str = "tpufleet-server"
    machine_type: str | None = None  # default: the cheapest that the zone has
    disk_gb: int | None = None
    network: str = "global/networks/default"
    subnetwork: Callable[[str], str] = lambda zone: ""  # of a zone
    service_account: str = "default"  # the default compute account of the project
    slice_roles: tuple[str, ...] = (preflight_accounts.TPU_ADMIN,)  # with which it makes slices
    allowed: tuple[str, ...] = ()  # from where clients connect, besides the VPC
    port: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def zone_path(self) -> str:
        return f"projects/{self.project}/zones/{self.zone}"

    @property
    def region_path(self) -> str:
        return f"projects/{self.project}/regions/{(self.zone or '').rpartition('-')[0]}"

    @property
    def network_project(self) -> str:
        """The host project of a shared VPC has its firewall rules, those of many projects."""
        words = self.network.split("/")
        return words[1] if words[0] == "projects" else self.project

    @property
    def rule_name(self) -> str:
        if self.network_project == self.project:
            return self.name
        return re.sub("[^a-z0-9]", "-", f"{self.name}-{self.project}")[:63].rstrip("-")


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """One resource of the plan, in the order of creation."""

    kind: str  # collection in the API
    name: str
    parent: str  # projects/P/zones/Z, projects/P/regions/R or projects/P/global
    body: dict[str, Any]
    description: str
    keeps_state: bool = False

    @property
    def noun(self) -> str:
        return self.kind.removesuffix("es" if self.kind == "addresses" else "s")

    @property
    def path(self) -> str:
        return f"{self.parent}/{self.kind}/{self.name}"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    settings: ServerVmSettings
    resources: tuple[tuple[str, str], ...]  # name and description
    updates: bool  # the VM exists
    usd_per_hour: float | None


def resources(settings: ServerVmSettings) -> list[Resource]:
    name, zone, rule = settings.name, settings.zone_path, settings.rule_name
    elsewhere = f" in {settings.network_project}" if rule != name else ""
    sources = list(dict.fromkeys([*PRIVATE_RANGES, *settings.allowed]))
    return [
        Resource(
            kind="addresses", name=name, parent=settings.region_path,
            body={"name": name, "addressType": "EXTERNAL"},
            description="static external address",
        ),
        Resource(
            kind="disks", name=f"{name}-state", parent=zone,
            body={
                "name": f"{name}-state", "sizeGb": str(settings.disk_gb),
                "type": f"{zone}/diskTypes/{DISK_TYPE}",
                "labels": {"tpufleet": "server"},
            },
            description=f"{settings.disk_gb} GB {DISK_TYPE} disk for the state",
            keeps_state=True,
        ),
        Resource(
            kind="firewalls", name=rule, parent=f"projects/{settings.network_project}/global",
            body={
                "name": rule, "network": settings.network, "direction": "INGRESS",
                "allowed": [{"IPProtocol": "tcp", "ports": [str(settings.port)]}],
                "sourceRanges": sources, "targetTags": [name],
            },
            description=f"firewall rule{elsewhere}: TCP {settings.port} from {', '.join(sources)}",
        ),
        Resource(
            kind="instances", name=name, parent=zone, body=_instance(settings),
            description=f"VM {settings.machine_type}, Debian 12",
        ),
    ]  # fmt: skip


def _instance(settings: ServerVmSettings) -> dict[str, Any]:
    name, zone = settings.name, settings.zone_path
    interface: dict[str, Any] = {"network": settings.network}
    if subnetwork := settings.subnetwork(settings.zone or ""):
        interface["subnetwork"] = subnetwork
    # natIP is filled in once the address is known.
    interface["accessConfigs"] = [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}]
    metadata = {
        "startup-script": startup_script.server_script(),
        naming.GUEST_ATTRIBUTES: "TRUE",
        PORT: str(settings.port),
        **settings.metadata,
    }
    return {
        "name": name,
        "machineType": f"zones/{settings.zone}/machineTypes/{settings.machine_type}",
        "disks": [
            {
                "boot": True, "autoDelete": True,
                "initializeParams": {"sourceImage": IMAGE, "diskSizeGb": "10"},
            },
            {"source": f"{zone}/disks/{name}-state", "deviceName": STATE_DEVICE,
             "autoDelete": False},
        ],
        "networkInterfaces": [interface],
        "metadata": {"items": _items(metadata)},
        "serviceAccounts": [{"email": settings.service_account, "scopes": [SCOPE]}],
        "tags": {"items": [name]},
        "labels": {"tpufleet": "server"},
    }  # fmt: skip


class ServerVm:
    """Creates, updates and deletes these resources. All of it can be repeated."""

    def __init__(
        self,
        rest: GoogleRest,
        settings: ServerVmSettings,
        report: Callable[[str], None] = lambda line: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rest = rest
        self._settings = settings
        self._report = report
        self._sleep = sleep

    def connect(self) -> list[str]:
        """Raises PermissionMissing without credentials or the Compute Engine API. Returns commands
        that grant roles which the account of the VM lacks, as far as that can be read."""
        try:
            self._rest.connect()
        except PermissionMissing as error:
            raise PermissionMissing(
                f"{error}\n  next: gcloud auth application-default login"
            ) from error
        deployed = self._deployed_zone()
        self._keep("--zone", self._settings.zone, deployed)
        zone = self._settings.zone or deployed or self._settings.default_zone
        self._settings = replace(self._settings, zone=zone)
        account = self._settings.service_account
        return preflight_accounts.grants_for_server(
            self._rest, self._settings.project, "" if account == "default" else account,
            self._settings.slice_roles,
        )  # fmt: skip

    def _deployed_zone(self) -> str:
        """Where its state disk is: that of a deleted server is used again."""
        disk = f"{self._settings.name}-state"
        path = _path(f"projects/{self._settings.project}/aggregated/disks")
        for answer in self._rest.pages("compute", path, filter=f'name="{disk}"'):
            self._check(answer, "list disks")
            for scope, listed in answer.body.get("items", {}).items():
                if any(each.get("name") == disk for each in listed.get("disks", ())):
                    return str(scope).removeprefix("zones/")
        return ""

    def _keep(self, option: str, chosen: str | int | None, deployed: str | int) -> None:
        if chosen and deployed and chosen != deployed:
            raise BadRequest(
                f"{option} {chosen}: {self._settings.name} has {deployed}, which cannot change\n"
                f"  next: leave out {option}, or delete the server with its state first"
            )

    def hosts(self) -> list[str]:
        """Internal and external address, if it exists: of its URLs."""
        vm = next(each for each in resources(self._settings) if each.kind == "instances")
        return [each for each in addresses_of(self._body(vm)) if each]

    def plan(self) -> Plan:
        """What would be created or updated. Settings that nobody chose are completed: as they are
        deployed, or else the default."""
        settings = self._settings
        exists = {each.kind: self._body(each) for each in resources(settings)}
        disk, rule, vm = (exists[kind] for kind in ("disks", "firewalls", "instances"))
        deployed_port = int(_metadata(vm).get(PORT, DEFAULT_PORT)) if vm else 0
        self._keep("--port", settings.port, deployed_port)
        self._keep("--disk-gb", settings.disk_gb, int(disk.get("sizeGb", 0)))
        machine = settings.machine_type or naming.short_name(vm.get("machineType", ""))
        machine, machine_price = self._machine_type(machine)
        in_force = [each for each in rule.get("sourceRanges", ()) if each not in PRIVATE_RANGES]
        disk_gb = int(disk.get("sizeGb", 0)) or settings.disk_gb or 10
        self._settings = replace(
            settings,
            machine_type=machine,
            disk_gb=disk_gb,
            port=deployed_port or settings.port or DEFAULT_PORT,
            allowed=settings.allowed or (tuple(in_force) if rule else EVERYWHERE),
        )
        disk_price = server_vm_prices.disk_usd_per_hour(
            DISK_TYPE, disk_gb + server_vm_prices.BOOT_DISK_GB
        )
        price = None
        if machine_price is not None and disk_price is not None:
            price = machine_price + disk_price + server_vm_prices.ADDRESS_USD_PER_HOUR
        return Plan(
            settings=self._settings,
            resources=tuple(
                (each.name, each.description + (" (exists)" if exists[each.kind] else ""))
                for each in resources(self._settings)
            ),
            updates=bool(vm),
            usd_per_hour=price,
        )

    def _machine_type(self, wanted: str) -> tuple[str, float | None]:
        """Name and price of this type, or of the cheapest that runs a server. Not every zone has
        every family: us-central2-b, which has v4, has no E2."""
        zone, listed = self._settings.zone, []
        path = _path(f"{self._settings.zone_path}/machineTypes")
        for answer in self._rest.pages("compute", path):
            self._check(answer, f"read {zone}")
            listed += answer.body.get("items", ())
        usable = [
            (price is None, price or 0.0, int(each["memoryMb"]), str(each["name"]))
            for each in listed
            if each["name"] == wanted or _runs_a_server(each)
            for price in [
                server_vm_prices.machine_usd_per_hour(
                    each["name"], each["guestCpus"], each["memoryMb"]
                )
            ]
        ]
        chosen = [each for each in usable if not wanted or each[3] == wanted]
        if not chosen:
            cheapest = f", such as {min(usable)[3]}" if usable else ""
            raise BadRequest(
                f"{zone} has no machine type {wanted or 'for a server'}\n"
                f"  next: pass another --machine-type{cheapest}, or another --zone"
            )
        unknown, price, _, name = min(chosen)
        return name, None if unknown else price

    def apply(self, metadata: Mapping[str, str]) -> str:
        """Create or update what was planned, and return the external address. What was created is
        deleted again if one of the resources is refused."""
        self._settings = replace(self._settings, metadata=metadata)
        created: list[Resource] = []
        address = ""
        try:
            for resource in resources(self._settings):
                if resource.kind == "instances":
                    interface = resource.body["networkInterfaces"][0]
                    interface["accessConfigs"][0]["natIP"] = address
                present = self._body(resource)
                if present:
                    self._update(resource, present)
                else:
                    self._create(resource, created)
                if resource.kind == "addresses":
                    address = str(self._body(resource).get("address", ""))
        except FleetError:
            for resource in reversed(created):
                try:
                    self._delete(resource)
                except FleetError as error:
                    self._report(str(error))
            raise
        return address

    def _create(self, resource: Resource, created: list[Resource]) -> None:
        if resource.kind == "instances":
            resource.body["metadata"]["items"] += _items({DEPLOYMENT: secrets.token_hex(8)})
        parent = resource.path.rpartition("/")[0]
        answer = self._rest.post("compute", _path(parent), resource.body)
        self._check(answer, f"create {resource.noun} {resource.name}", resource)
        created.append(resource)
        self._finish(resource, answer, "create")
        self._report(f"{resource.description}: {resource.name} created")

    def _update(self, resource: Resource, present: dict[str, Any]) -> None:
        """Addresses stay, and so do disks: a running job's hosts know the server by the former."""
        changed = False
        if resource.kind == "firewalls":
            fields = ("sourceRanges", "allowed")
            changed = any(
                _unordered(present.get(key)) != _unordered(resource.body[key]) for key in fields
            )
            if changed:
                body = {key: resource.body[key] for key in fields}
                answer = self._rest.patch("compute", _path(resource.path), body)
                self._finish(resource, answer, "update")
        elif resource.kind == "instances":
            changed = self._update_instance(resource, present)
        self._report(
            f"{resource.description}: {resource.name} {'updated' if changed else 'exists'}"
        )

    def _update_instance(self, resource: Resource, present: dict[str, Any]) -> bool:
        """Its startup script reads the metadata at a boot. Stopping and starting keeps disks and
        the internal address, and lets the server write what it has in memory."""
        deployed, machine = _metadata(present), resource.body["machineType"]
        wanted = {**deployed, **_metadata(resource.body)}  # others may have added items
        other_machine = naming.short_name(present["machineType"]) != naming.short_name(machine)
        last = self._report_of(deployed.get(DEPLOYMENT, ""))
        ready = last is not None and last.stage is BootstrapStage.CONNECTED
        if ready and wanted == deployed and present["status"] == "RUNNING" and not other_machine:
            return False
        metadata = {
            "fingerprint": present["metadata"].get("fingerprint", ""),
            "items": _items({**wanted, DEPLOYMENT: secrets.token_hex(8)}),
        }
        calls: list[tuple[str, dict[str, Any]]] = [("stop", {}), ("setMetadata", metadata)]
        if other_machine:
            calls.append(("setMachineType", {"machineType": machine}))
        for verb, body in [*calls, ("start", {})]:
            answer = self._rest.post("compute", _path(f"{resource.path}/{verb}"), body)
            self._finish(resource, answer, verb)
        return True

    def _delete(self, resource: Resource) -> None:
        answer = self._rest.delete("compute", _path(resource.path))
        if not answer.missing:
            self._finish(resource, answer, "delete")
            self._report(f"{resource.description}: {resource.name} deleted")

    def delete(self, *, with_state: bool = False) -> list[str]:
        """The names of disks that stay."""
        kept = []
        for resource in reversed(resources(self._settings)):
            if not resource.keeps_state or with_state:
                self._delete(resource)
            elif self._body(resource):
                kept.append(resource.name)
        return kept

    def wait_until_ready(self) -> str:
        """The certificate of the server's CA. Raises ProviderError with what failed on the VM."""
        vm = next(each for each in resources(self._settings) if each.kind == "instances")
        deployment = _metadata(self._body(vm)).get(DEPLOYMENT, "")
        last: BootstrapReport | None = None
        for _ in range(int(READY_SECONDS / POLL_SECONDS)):
            report = self._report_of(deployment)
            if report is not None and report.stage is BootstrapStage.CONNECTED:
                return self._guest_attribute(bootstrap.CA_KEY)
            if report is not None and report.failed:
                raise ProviderUnavailable(f"the server does not start: {report.text}")
            if report is not None and report != last:
                last = report
                self._report(f"VM: {report.stage}")
            self._sleep(POLL_SECONDS)
        where = f"last report: {last.text}" if last is not None else "no report from the VM"
        raise ProviderUnavailable(
            f"the server is not ready after {READY_SECONDS / 60:.0f} min; {where}"
        )

    def _report_of(self, deployment: str) -> BootstrapReport | None:
        """The last of the VM; None if it is of an earlier deployment."""
        report = bootstrap.parse_report(self._guest_attribute(bootstrap.GUEST_KEY))
        return report if report is not None and report.slice_id == deployment else None

    def _guest_attribute(self, key: str) -> str:
        path = _path(f"{self._settings.zone_path}/instances/{self._settings.name}")
        query = f"{bootstrap.GUEST_NAMESPACE}/{key}"
        answer = self._rest.get("compute", f"{path}/getGuestAttributes", queryPath=query)
        if answer.missing:  # none is written yet
            return ""
        self._check(answer, f"read guest attributes of {self._settings.name}")
        items = answer.body.get("queryValue", {}).get("items", [])
        return next((str(item["value"]) for item in items if item.get("key") == key), "")

    def _body(self, resource: Resource) -> dict[str, Any]:
        """Empty if it does not exist."""
        answer = self._rest.get("compute", _path(resource.path))
        if answer.missing:
            return {}
        self._check(answer, f"read {resource.noun} {resource.name}", resource)
        return answer.body

    def _finish(self, resource: Resource, answer: Answer, verb: str) -> None:
        """Wait for the operation."""
        action = f"{verb} {resource.noun} {resource.name}"
        self._check(answer, action, resource)
        path = _path(f"{resource.parent}/operations/{answer.body.get('name', '')}")
        for _ in range(int(OPERATION_SECONDS / POLL_SECONDS)):
            if answer.body.get("status") == "DONE":
                break
            self._sleep(POLL_SECONDS)
            answer = self._rest.get("compute", path)
            self._check(answer, action, resource)
        errors = answer.body.get("error", {}).get("errors", [])
        if errors:
            message = "; ".join(str(error.get("message", error)) for error in errors)
            raise ProviderError(_cannot(action, message))

    def _check(self, answer: Answer, action: str, resource: Resource | None = None) -> None:
        if answer.status < 300:
            return
        message = _cannot(action, answer.message or answer.status)
        if answer.status in (401, 403):
            parent = resource.parent if resource else self._settings.zone_path
            raise PermissionMissing(
                f"{message}\n  next: gcloud services enable compute.googleapis.com "
                f"--project {parent.split('/')[1]}; creating a server needs "
                "roles/compute.admin and roles/iam.serviceAccountUser"
            )
        raise BadRequest(message) if answer.status < 500 else ProviderUnavailable(message)


def _path(path: str) -> str:
    return f"compute/v1/{path}"


def _cannot(action: str, reason: object) -> str:
    return f"cannot {action}: {reason}"


def _runs_a_server(machine: dict[str, Any]) -> bool:
    """Of Compute Engine's resource machineTypes. Bundles are for x86."""
    return (
        int(machine.get("memoryMb", 0)) >= MEMORY_MB
        and machine.get("architecture") != "ARM64"
        and not machine.get("accelerators")
        and not machine.get("deprecated")
    )


def addresses_of(vm: Mapping[str, Any]) -> tuple[str, str]:
    """Internal and external."""
    interface: dict[str, Any] = next(iter(vm.get("networkInterfaces", ())), {})
    access: dict[str, Any] = next(iter(interface.get("accessConfigs", ())), {})
    return str(interface.get("networkIP", "")), str(access.get("natIP", ""))


def _metadata(instance: dict[str, Any]) -> dict[str, str]:
    items = instance.get("metadata", {}).get("items", ())
    return {str(item["key"]): str(item.get("value", "")) for item in items}


def _items(metadata: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": metadata[key]} for key in metadata]


def _unordered(values: Any) -> list[str]:
    return sorted(map(str, values or ()))
