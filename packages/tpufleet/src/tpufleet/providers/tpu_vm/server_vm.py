"""A VM in the project that runs the tpufleet server, for operators whose own machine TPU hosts
cannot reach. Made of four resources of the Compute Engine API v1:
https://cloud.google.com/compute/docs/reference/rest/v1"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tpufleet.errors import BadRequest, PermissionMissing, ProviderError, ProviderUnavailable
from tpufleet.model.fleet import bootstrap
from tpufleet.model.fleet.bootstrap import BootstrapReport, BootstrapStage
from tpufleet.providers.tpu_vm import naming, preflight_accounts, startup_script
from tpufleet.providers.tpu_vm.google_rest import Answer, GoogleRest

# The smallest E2 machine with enough memory (2 GB); e2-micro has 1 GB.
DEFAULT_MACHINE_TYPE = "e2-small"
DEFAULT_PORT = 8470
IMAGE = "projects/debian-cloud/global/images/family/debian-12"
DISK_TYPE = "pd-balanced"
STATE_DEVICE = "tpufleet-state"  # /dev/disk/by-id/google-tpufleet-state
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
# Of TPU hosts in the VPC: subnets in auto mode are in 10.128.0.0/9.
PRIVATE_RANGES = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
POLL_SECONDS = 1.0
OPERATION_SECONDS = 300.0
READY_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerVmSettings:
    project: str
    zone: str
    name: str = "tpufleet-server"
    machine_type: str = DEFAULT_MACHINE_TYPE
    disk_gb: int = 10
    network: str = "global/networks/default"
    subnetwork: str = ""
    service_account: str = "default"  # the default compute account of the project
    allowed: tuple[str, ...] = ("0.0.0.0/0",)  # from where clients connect, besides the VPC
    port: int = DEFAULT_PORT
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def region(self) -> str:
        return self.zone.rpartition("-")[0]


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """One resource of the plan, in the order of creation."""

    kind: str  # collection in the API
    name: str
    parent: str  # zones/Z, regions/R or global
    body: dict[str, Any]
    description: str
    keeps_state: bool = False

    @property
    def noun(self) -> str:
        return self.kind.removesuffix("es" if self.kind == "addresses" else "s")

    @property
    def collection(self) -> str:
        return f"{self.parent}/{self.kind}"


def plan(settings: ServerVmSettings) -> list[Resource]:
    name, zone = settings.name, f"zones/{settings.zone}"
    sources = list(dict.fromkeys([*PRIVATE_RANGES, *settings.allowed]))
    return [
        Resource(
            kind="addresses", name=name, parent=f"regions/{settings.region}",
            body={"name": name, "addressType": "EXTERNAL"},
            description="static external address",
        ),
        Resource(
            kind="disks", name=f"{name}-state", parent=zone,
            body={
                "name": f"{name}-state", "sizeGb": str(settings.disk_gb),
                "type": f"projects/{settings.project}/{zone}/diskTypes/{DISK_TYPE}",
            },
            description=f"{settings.disk_gb} GB {DISK_TYPE} disk for the state",
            keeps_state=True,
        ),
        Resource(
            kind="firewalls", name=name, parent="global",
            body={
                "name": name, "network": settings.network, "direction": "INGRESS",
                "allowed": [{"IPProtocol": "tcp", "ports": [str(settings.port)]}],
                "sourceRanges": sources, "targetTags": [name],
            },
            description=f"firewall rule: TCP {settings.port} from {', '.join(sources)}",
        ),
        Resource(
            kind="instances", name=name, parent=zone, body=_instance(settings),
            description=f"VM {settings.machine_type}, Debian 12",
        ),
    ]  # fmt: skip


def _instance(settings: ServerVmSettings) -> dict[str, Any]:
    name, zone = settings.name, f"projects/{settings.project}/zones/{settings.zone}"
    interface: dict[str, Any] = {"network": settings.network}
    if settings.subnetwork:
        interface["subnetwork"] = settings.subnetwork
    # natIP is filled in once the address is known.
    interface["accessConfigs"] = [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}]
    metadata = {
        "startup-script": startup_script.server_script(),
        naming.GUEST_ATTRIBUTES: "TRUE",
        "tpufleet-port": str(settings.port),
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
        "metadata": {"items": [{"key": key, "value": metadata[key]} for key in metadata]},
        "serviceAccounts": [{"email": settings.service_account, "scopes": [SCOPE]}],
        "tags": {"items": [name]},
        "labels": {"tpufleet": "server"},
    }  # fmt: skip


class ServerVm:
    """Creates and deletes what the plan names. What exists is kept, so both can be repeated."""

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

    def check_access(self) -> list[str]:
        """Raises PermissionMissing without credentials or the Compute Engine API. Returns commands
        that grant roles which the account of the VM lacks, as far as that can be read."""
        try:
            self._rest.connect()
        except PermissionMissing as error:
            raise PermissionMissing(
                f"{error}\n  next: gcloud auth application-default login"
            ) from error
        zone = f"zones/{self._settings.zone}"
        self._check(self._rest.get("compute", self._path(zone)), f"read {zone}")
        account = self._settings.service_account
        return preflight_accounts.grants_for_server(
            self._rest, self._settings.project, "" if account == "default" else account
        )

    def create(self) -> str:
        """The external address."""
        address = ""
        for resource in plan(self._settings):
            body = resource.body
            if resource.kind == "instances":
                body["networkInterfaces"][0]["accessConfigs"][0]["natIP"] = address
            answer = self._rest.post("compute", self._path(resource.collection), body)
            if answer.status == 409:
                self._report(f"{resource.description}: {resource.name} exists")
            else:
                self._finish(resource, answer, "create")
                self._report(f"{resource.description}: {resource.name} created")
            if resource.kind == "addresses":
                address = str(self._get(resource).body.get("address", ""))
        return address

    def delete(self, *, with_state: bool = False) -> list[str]:
        """The names of disks that stay."""
        kept = []
        for resource in reversed(plan(self._settings)):
            if resource.keeps_state and not with_state:
                if self._get(resource).status == 200:
                    kept.append(resource.name)
                continue
            answer = self._rest.delete(
                "compute", self._path(f"{resource.collection}/{resource.name}")
            )
            if not answer.missing:
                self._finish(resource, answer, "delete")
                self._report(f"{resource.description}: {resource.name} deleted")
        return kept

    def wait_until_ready(self) -> str:
        """The certificate of the server's CA. Raises ProviderError with what failed on the VM."""
        last: BootstrapReport | None = None
        for _ in range(int(READY_SECONDS / POLL_SECONDS)):
            report = bootstrap.parse_report(self._guest_attribute(bootstrap.GUEST_KEY))
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

    def _guest_attribute(self, key: str) -> str:
        path = self._path(f"zones/{self._settings.zone}/instances/{self._settings.name}")
        query = f"{bootstrap.GUEST_NAMESPACE}/{key}"
        answer = self._rest.get("compute", f"{path}/getGuestAttributes", queryPath=query)
        if answer.missing:  # none is written yet
            return ""
        self._check(answer, f"read guest attributes of {self._settings.name}")
        items = answer.body.get("queryValue", {}).get("items", [])
        return next((str(item["value"]) for item in items if item.get("key") == key), "")

    def _get(self, resource: Resource) -> Answer:
        return self._rest.get("compute", self._path(f"{resource.collection}/{resource.name}"))

    def _finish(self, resource: Resource, answer: Answer, verb: str) -> None:
        """Wait for the operation."""
        action = f"{verb} {resource.noun} {resource.name}"
        self._check(answer, action)
        path = self._path(f"{resource.parent}/operations/{answer.body.get('name', '')}")
        for _ in range(int(OPERATION_SECONDS / POLL_SECONDS)):
            if answer.body.get("status") == "DONE":
                break
            self._sleep(POLL_SECONDS)
            answer = self._rest.get("compute", path)
            self._check(answer, action)
        errors = answer.body.get("error", {}).get("errors", [])
        if errors:
            message = "; ".join(str(error.get("message", error)) for error in errors)
            raise ProviderError(f"cannot {action}: {message}")

    def _check(self, answer: Answer, action: str) -> None:
        if answer.status < 300:
            return
        message = f"cannot {action}: {answer.message or answer.status}"
        if answer.status in (401, 403):
            raise PermissionMissing(
                f"{message}\n  next: gcloud services enable compute.googleapis.com "
                f"--project {self._settings.project}; creating a server needs "
                "roles/compute.admin and roles/iam.serviceAccountUser"
            )
        raise BadRequest(message) if answer.status < 500 else ProviderUnavailable(message)

    def _path(self, path: str) -> str:
        return f"compute/v1/projects/{self._settings.project}/{path}"
