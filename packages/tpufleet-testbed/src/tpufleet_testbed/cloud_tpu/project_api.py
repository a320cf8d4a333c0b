"""REST APIs of the emulated project: IAM, service usage, quota, networks, buckets and VMs. What
`tpu init check` and `tpu deploy server` use, and no more. By default everything is set up."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tpufleet.clocks import SystemClock
from tpufleet.model.tpu import tpu_zones
from tpufleet_testbed.cloud_tpu import catalog
from tpufleet_testbed.cloud_tpu.api_errors import PROJECT_NUMBER
from tpufleet_testbed.cloud_tpu.queued_rest import QueuedRest
from tpufleet_testbed.compute_engine import capacity, views
from tpufleet_testbed.compute_engine.api_errors import call_error
from tpufleet_testbed.compute_engine.engine import ComputeEngine
from tpufleet_testbed.compute_engine.plain_resources import PlainResources
from tpufleet_testbed.compute_engine.rest import ComputeRest
from tpufleet_testbed.compute_engine.scheduled_faults import schedule_faults
from tpufleet_testbed.servers import Answer, HttpServer

# By the first part of our paths. Service Usage and Cloud Storage are enabled in every project.
SERVICES = {
    "compute": "compute.googleapis.com",
    "container": "container.googleapis.com",
    "iam": "iam.googleapis.com",
    "projects": "cloudresourcemanager.googleapis.com",
    "quotas": "cloudquotas.googleapis.com",
    "tpu": "tpu.googleapis.com",
}
TITLES = {"compute.googleapis.com": "Compute Engine API"}
DEFAULT_QUOTA = 1024
QUOTA_PERMISSION = "cloudquotas.quotas.get"
_NETWORKING = re.compile(r"/(networks|subnetworks|firewalls|routers)(/|$)")
DEFAULT_ACCOUNT = f"{PROJECT_NUMBER}-compute@developer.gserviceaccount.com"


def nat_router(network: str = "default", **nat: Any) -> dict[str, Any]:
    """As `gcloud compute routers nats create --nat-all-subnet-ip-ranges` leaves it."""
    made = {"type": "PUBLIC", "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES"}
    return {
        "kind": "compute#router", "name": "nat", "nats": [{"name": "nat", **made, **nat}],
        "network": views.link("my-project", f"global/networks/{network}"),
    }  # fmt: skip


@dataclass(slots=True)
class ProjectState:
    """What exists in the emulated project."""

    exists: bool = True
    disabled_apis: set[str] = field(default_factory=set)  # tpu.googleapis.com
    # Roles of the default service account, in the policy of the project.
    account_roles: set[str] = field(default_factory=lambda: {"roles/editor"})
    denied_permissions: set[str] = field(default_factory=set)
    quota: dict[tuple[str, str], int] = field(default_factory=dict)  # by quota id and place
    missing: set[str] = field(default_factory=set)  # last parts of names that do not exist
    private_access: bool = True  # of subnetworks
    host_project: str = ""  # of a shared VPC, which has all networks; empty: each project has
    bucket_location: str = "US-CENTRAL1"
    subnetworks: dict[str, str] = field(default_factory=dict)  # their networks; others: default
    routers: list[dict[str, Any]] = field(default_factory=lambda: [nat_router()])  # of each region
    objects: set[str] = field(default_factory=set)  # bucket/name
    clusters: list[dict[str, Any]] = field(default_factory=list)  # of GKE, in all locations


class ProjectApi:
    def __init__(self, engine: ComputeEngine | None = None, port: int = 0) -> None:
        self.state = ProjectState()
        engine = engine or ComputeEngine(SystemClock())
        self.compute = PlainResources(engine)
        self.tpus = ComputeRest(
            engine,
            self.compute,
            is_denied=lambda permission: permission in self.state.denied_permissions,
            missing=self.state.missing,
        )
        self.queued: QueuedRest | None = None
        schedule_faults(self.tpus.engine)
        self._server = HttpServer(self._answer, ("127.0.0.1", port))
        self.url = self._server.url

    def close(self) -> None:
        self.tpus.closing.set()
        self._server.close()

    def answer(
        self, target: str, body: dict[str, Any], method: str = "GET"
    ) -> tuple[int, dict[str, Any]]:
        parts = urlsplit(target)
        _, api, path = unquote(parts.path).split("/", 2)
        service, state = SERVICES.get(api, ""), self.state
        if service in self.state.disabled_apis and api != "compute":
            return _disabled(service)
        elsewhere = state.host_project and f"projects/{state.host_project}/" not in path
        if elsewhere and _NETWORKING.search(path) and method == "GET":
            listed = path.endswith(("firewalls", "routers", "subnetworks"))
            return (200, {}) if listed else _not_found(path)
        if api == "compute":
            if service in self.state.disabled_apis:
                return 403, call_error("disabled").body()
            # Google's client has no prefix for the API before the path.
            plain = path if path.startswith("compute/") else f"compute/{path}"
            first = {name: values[0] for name, values in parse_qs(parts.query).items()}
            reply = self.tpus.answer(method, plain, first, body)
            if reply is not None:
                return reply
        last = path.rpartition("/")[2]
        if path.startswith("v2alpha1/") and last == "queuedResources" and self.queued is not None:
            first = {name: values[0] for name, values in parse_qs(parts.query).items()}
            parent = path.removeprefix("v2alpha1/").removesuffix(f"/{last}")
            return self.queued.create(parent, first, body)
        if api == "storage" and path.endswith("/iam/testPermissions"):
            return 200, {"permissions": self._granted(parse_qs(parts.query).get("permissions", []))}
        if path.endswith(":getIamPolicy"):
            return 200, {"bindings": self._bindings()}
        if path.endswith(":enable"):
            service = last.removesuffix(":enable")
            state.disabled_apis.discard(service)
            return 200, {"done": True, "response": {"service": {"state": "ENABLED"}}}
        if api == "storage" and path == "storage/v1/b" and method == "POST":
            state.missing.discard(str(body.get("name", "")))
            return 200, {"name": body.get("name", "")}
        if path.endswith(":testIamPermissions"):
            if last.removesuffix(":testIamPermissions") in state.missing:
                return _not_found(path)
            return 200, {"permissions": self._granted(body.get("permissions", []))}
        if last in state.missing:
            return _not_found(path)
        match api:
            case "projects":
                found = {"projectId": last, "projectNumber": str(PROJECT_NUMBER)}
                return (200, found) if state.exists else _not_found(path)
            case "services":
                return 200, {"state": "DISABLED" if last in state.disabled_apis else "ENABLED"}
            case "quotas" if not self._granted([QUOTA_PERMISSION]):
                message = f"Permission '{QUOTA_PERMISSION}' denied on resource '{path}'"
                error = {"code": 403, "message": message, "status": "PERMISSION_DENIED"}
                return 403, {"error": error}
            case "quotas" if "/compute.googleapis.com/" in path:
                quota = capacity.quota_info(last, self.tpus.engine.quota)
                return (200, quota) if quota is not None else _not_found(path)
            case "quotas":
                return 200, {"dimensionsInfos": self._quotas(last)}
            case "compute" if path.endswith(f"/zones/{last}") and last not in tpu_zones.zones():
                return _not_found(path)
            case "compute" if last == "routers":
                return 200, {"kind": "compute#routerList", "items": state.routers}
            case "compute" if path.endswith(f"/networks/{last}"):
                return 200, {"kind": "compute#network", "name": last}
            case "compute" if path.endswith(f"/subnetworks/{last}"):
                project = path.removeprefix("compute/v1/projects/").partition("/")[0]
                network = state.subnetworks.get(last, "default")
                return 200, {
                    "kind": "compute#subnetwork", "name": last,
                    "network": views.link(project, f"global/networks/{network}"),
                    "privateIpGoogleAccess": state.private_access,
                }  # fmt: skip
            case "container" if last == "clusters":
                return 200, {"clusters": state.clusters}
            case "tpu" if last in catalog.RUNTIME_VERSIONS:
                return 200, {"name": path.removeprefix("v2/"), "version": last}
            case "storage" if last == "iam":
                return 200, {"kind": "storage#policy", "bindings": []}
            case "storage" if "/o/" in path:
                name = path.removeprefix("storage/v1/b/").replace("/o/", "/", 1)
                return (200, {"name": name}) if name in state.objects else _not_found(path)
            case "storage":
                return 200, {"name": last, "location": state.bucket_location}
        return _not_found(path)

    def _granted(self, permissions: list[str]) -> list[str]:
        return [each for each in permissions if each not in self.state.denied_permissions]

    def _bindings(self) -> list[dict[str, Any]]:
        member = f"serviceAccount:{DEFAULT_ACCOUNT}"
        return [{"role": role, "members": [member]} for role in sorted(self.state.account_roles)]

    def _quotas(self, quota_id: str) -> list[dict[str, Any]]:
        kind, places = "zone", tpu_zones.zones()
        if "PerRegion" in quota_id:
            kind, places = "region", tuple(sorted({zone.rpartition("-")[0] for zone in places}))
        return [
            {
                "dimensions": {kind: place},
                "details": {"value": str(self.state.quota.get((quota_id, place), DEFAULT_QUOTA))},
                "applicableLocations": [place],
            }
            for place in places
        ]

    def _answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        status, content = self.answer(target, json.loads(body or b"{}"), method)
        return status, {"Content-Type": "application/json"}, json.dumps(content).encode()


def _not_found(path: str) -> tuple[int, dict[str, Any]]:
    return 404, {"error": {"code": 404, "message": f"{path} was not found", "status": "NOT_FOUND"}}


def _disabled(service: str) -> tuple[int, dict[str, Any]]:
    page = f"https://console.developers.google.com/apis/api/{service}/overview"
    message = (
        f"{TITLES.get(service, service)} has not been used in project {PROJECT_NUMBER} before or "
        f"it is disabled. Enable it by visiting {page}?project={PROJECT_NUMBER} then retry."
    )
    return 403, {"error": {"code": 403, "message": message, "status": "PERMISSION_DENIED"}}
