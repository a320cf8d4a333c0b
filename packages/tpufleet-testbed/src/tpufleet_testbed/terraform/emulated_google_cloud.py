"""Resources of an emulated Google Cloud, kept in one JSON file: create, read, update, delete.

It refuses what Google Cloud refuses in the same situation: a second resource of the same name, and
a reference to a bucket, cluster or service account that does not exist.
"""

from __future__ import annotations

import ipaddress
import json
import re
import threading
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from tpufleet.model.tpu import machine_types, type_lookup

Record = dict[str, Any]

# What identifies a resource among those of its type.
IDENTITY = {
    "google_artifact_registry_repository": ("project", "location", "repository_id"),
    "google_billing_account_iam_member": ("billing_account_id", "role", "member"),
    "google_billing_budget": ("billing_account", "display_name"),
    "google_compute_router_nat": ("project", "region", "router", "name"),
    "google_compute_subnetwork_iam_member": (
        "project",
        "region",
        "subnetwork",
        "role",
        "member",
    ),
    "google_container_node_pool": ("project", "location", "cluster", "name"),
    "google_project_iam_custom_role": ("project", "role_id"),
    "google_project_iam_member": ("project", "role", "member"),
    "google_project_service": ("project", "service"),
    "google_service_account": ("project", "account_id"),
    "google_service_account_iam_member": ("service_account_id", "role", "member"),
    "google_storage_bucket": ("name",),
    "google_storage_bucket_iam_member": ("bucket", "role", "member"),
    "google_storage_bucket_object": ("bucket", "name"),
    "google_vertex_ai_tensorboard": ("project", "region", "display_name"),
}
DEFAULT_IDENTITY = ("project", "location", "region", "name")
# Argument that must name an existing resource: its type, and the attribute that it names.
REFERENCES = {
    ("google_storage_bucket_iam_member", "bucket"): ("google_storage_bucket", "name"),
    ("google_storage_bucket_object", "bucket"): ("google_storage_bucket", "name"),
    ("google_container_node_pool", "cluster"): ("google_container_cluster", "name"),
    ("google_service_account_iam_member", "service_account_id"): ("google_service_account", "name"),
    ("google_compute_subnetwork", "network"): ("google_compute_network", "id"),
    ("google_compute_router_nat", "router"): ("google_compute_router", "name"),
}

# By the beginning of a resource type: its API, of those that a new project has not enabled.
APIS = {
    "google_artifact_registry_": "artifactregistry",
    "google_billing_account_": "cloudbilling",
    "google_billing_budget": "billingbudgets",
    "google_compute_": "compute",
    "google_container_": "container",
    "google_project_iam_custom_role": "iam",
    "google_project_iam_member": "cloudresourcemanager",
    "google_service_account": "iam",
    "google_vertex_ai_": "aiplatform",
}
GKE = "container.googleapis.com"
SERVICE_AGENT = re.compile(
    r"serviceAccount:service-([0-9]+)@container-engine-robot\.iam\.gserviceaccount\.com"
)


class Refused(Exception):
    """Google Cloud's answer to a request that it does not carry out."""


@cache
def published_permissions() -> frozenset[str]:
    """Of IAM, as far as tpufleet uses the services."""
    listed = json.loads(Path(__file__).with_name("iam_permissions.json").read_text())
    return frozenset(listed["permissions"])


class EmulatedGoogleCloud:
    def __init__(self, file: Path, *, creates_before_failure: int | None = None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._creates_left = creates_before_failure

    def records(self) -> dict[str, Record]:
        """By `type/identity`."""
        if not self._file.exists():
            return {}
        records: dict[str, Record] = json.loads(self._file.read_text())
        return records

    def write(self, records: dict[str, Record]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(records, indent=1, sort_keys=True))

    def create(self, kind: str, record: Record) -> None:
        with self._lock:
            if self._creates_left is not None:
                if self._creates_left <= 0:
                    raise Refused("503 backendError: The service is currently unavailable.")
                self._creates_left -= 1
            records, key = self.records(), key_of(kind, record)
            if key in records:
                raise Refused(f"409 alreadyExists: {key} already exists.")
            _check(kind, record, records)
            self.write({**records, key: record})

    def update(self, kind: str, record: Record) -> None:
        with self._lock:
            records, key = self.records(), key_of(kind, record)
            if key not in records:
                raise Refused(f"404 notFound: {key} does not exist.")
            _check(kind, record, records)
            if kind == "google_compute_subnetwork":
                _check_ranges(records[key], record)
            self.write({**records, key: record})

    def delete(self, kind: str, record: Record) -> None:
        if kind == "google_container_cluster" and record.get("deletion_protection"):
            raise Refused(
                "Cannot destroy cluster because deletion_protection is set to true. "
                "Set it to false to proceed with cluster deletion."
            )
        with self._lock:
            records = self.records()
            records.pop(key_of(kind, record), None)
            self.write(records)

    def read(self, kind: str, record: Record) -> Record | None:
        return self.records().get(key_of(kind, record))

    def find(self, kind: str, name: str) -> Record | None:
        """A resource to import, by its name."""
        for key, record in self.records().items():
            if key.startswith(f"{kind}/") and record.get("name") == name:
                return record
        return None


def _check(kind: str, record: Record, records: dict[str, Record]) -> None:
    """Of a new resource and of a changed one."""
    _check_references(kind, record, records)
    _check_member(record, records)
    _check_enabled(kind, record, records)
    _check_values(kind, record)


def _check_references(kind: str, record: Record, records: dict[str, Record]) -> None:
    for (owner, argument), (target, attribute) in REFERENCES.items():
        if owner != kind or record.get(argument) is None:
            continue
        wanted = record[argument]
        existing = [
            other[attribute]
            for key, other in records.items()
            if key.startswith(f"{target}/") and other.get(attribute)
        ]
        if wanted not in existing:
            raise Refused(f"404 notFound: {target} {wanted} does not exist.")


def _check_member(record: Record, records: dict[str, Record]) -> None:
    """https://cloud.google.com/iam/docs/service-agents: GKE has one once its API is enabled."""
    found = SERVICE_AGENT.fullmatch(str(record.get("member")))
    services = [each for key, each in records.items() if key.startswith("google_project_service/")]
    if found and services:
        enabled = [each["project"] for each in services if each["service"] == GKE]
        if found[1] not in map(project_number, enabled):
            raise Refused(f"400 badRequest: Service account {record['member']} does not exist.")


def _check_enabled(kind: str, record: Record, records: dict[str, Record]) -> None:
    """Of projects whose APIs are managed here; those of a billing account are of any project."""
    project = record.get("project")
    enabled = {
        each["service"].partition(".")[0]
        for key, each in records.items()
        if key.startswith("google_project_service/") and project in (None, each["project"])
    }
    needed = next((api for prefix, api in APIS.items() if kind.startswith(prefix)), None)
    if enabled and needed is not None and needed not in enabled:
        raise Refused(
            f"403 accessNotConfigured: {needed}.googleapis.com has not been used in project "
            f"{project or ''} before or it is disabled."
        )


def _check_values(kind: str, record: Record) -> None:
    """What the schema allows, and Google does not."""
    if kind == "google_billing_budget":
        [amount] = record["amount"]
        if int(amount["specified_amount"][0]["units"] or 0) <= 0:
            raise Refused("400 INVALID_ARGUMENT: the amount of a budget must be positive.")
    if kind == "google_project_iam_custom_role":
        for name in sorted({*record["permissions"]} - published_permissions()):
            raise Refused(f"400 badRequest: Permission {name} is not valid.")
    if kind == "google_container_node_pool":
        machine = record["node_config"][0]["machine_type"]
        known = [each for each in type_lookup.all_types().values() if each.machine_type == machine]
        if not known and not machine_types.may_exist(machine):
            raise Refused(f"400 badRequest: Machine type with name '{machine}' does not exist.")
        topology = next((each["tpu_topology"] for each in record["placement_policy"]), None)
        hosts = {each.hosts for each in known if each.topology == topology}
        # https://cloud.google.com/kubernetes-engine/docs/how-to/tpus: all hosts of a slice, or none
        if hosts and record["node_count"] is not None and record["node_count"] not in hosts:
            count = record["node_count"]
            raise Refused(f"400 badRequest: {count} nodes of {machine} are not {topology}.")


def _check_ranges(before: Record, after: Record) -> None:
    """https://cloud.google.com/vpc/docs/create-modify-vpc-networks: a primary range only grows, a
    secondary range that a cluster uses cannot change."""
    old, new = (ipaddress.IPv4Network(each["ip_cidr_range"]) for each in (before, after))
    if not old.subnet_of(new):
        raise Refused(f"400 invalid: ipCidrRange {new} does not contain {old}.")
    kept = {item["range_name"]: item["ip_cidr_range"] for item in after["secondary_ip_range"]}
    for item in before["secondary_ip_range"]:
        if kept.get(item["range_name"]) != item["ip_cidr_range"]:
            name = item["range_name"]
            raise Refused(f"400 resourceInUse: the secondary range {name} is used by a cluster.")


def project_number(project: str) -> str:
    return str(10**11 + zlib.crc32(project.encode()))


def key_of(kind: str, record: Record) -> str:
    parts = [str(record[name]) for name in IDENTITY.get(kind, DEFAULT_IDENTITY) if record.get(name)]
    return f"{kind}/{'/'.join(parts)}"


def computed_values(kind: str, record: Record) -> Record:
    """Attributes that Google Cloud sets, by name; `id` stands for those not listed."""
    identifier = key_of(kind, record).removeprefix(f"{kind}/")
    values: Record = {"id": identifier, "name": identifier}
    if kind == "google_service_account":
        email = f"{record['account_id']}@{record['project']}.iam.gserviceaccount.com"
        values |= {
            "email": email,
            "member": f"serviceAccount:{email}",
            "name": f"projects/{record['project']}/serviceAccounts/{email}",
        }
    if kind == "google_project":
        values = {
            "id": f"projects/{record['project_id']}",
            "name": record["project_id"],
            "number": project_number(record["project_id"]),
        }
    if kind == "google_compute_network":
        values["id"] = f"projects/{record['project']}/global/networks/{record['name']}"
    if kind == "google_vertex_ai_tensorboard":
        location = f"projects/{record['project']}/locations/{record['region']}"
        values["name"] = f"{location}/tensorboards/1"
    return values
