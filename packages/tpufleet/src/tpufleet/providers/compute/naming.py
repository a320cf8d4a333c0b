"""Names in Compute Engine: of templates, workload policies and groups, their paths and labels.

A slice has the name of its group or instance. Templates and policies are shared by slices of the
same configuration; their names begin with that of the fleet, which alone collects them.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import Any

import msgspec

from tpufleet.model.fleet.slices import SliceId
from tpufleet.providers.base import Order
from tpufleet.providers.tpu_vm import naming

FLEET, SLICE, ORDER, CAPACITY = naming.FLEET, naming.SLICE, naming.ORDER, naming.CAPACITY
MAX_BASE_NAME = 58  # of the instances of a group, which get five more characters


class Location(msgspec.Struct, frozen=True, kw_only=True):
    project: str
    zone: str

    @property
    def region(self) -> str:
        return self.zone.rpartition("-")[0]

    @property
    def zone_path(self) -> str:
        return f"projects/{self.project}/zones/{self.zone}"

    @property
    def region_path(self) -> str:
        return f"projects/{self.project}/regions/{self.region}"

    def group(self, name: str) -> str:
        return f"{self.zone_path}/instanceGroupManagers/{name}"

    def instance(self, name: str) -> str:
        return f"{self.zone_path}/instances/{name}"

    def template(self, name: str) -> str:
        return f"{self.region_path}/instanceTemplates/{name}"

    def policy(self, name: str) -> str:
        return f"{self.region_path}/resourcePolicies/{name}"


def short(path: str) -> str:
    return path.rpartition("/")[2]


def shared_prefix(fleet: str) -> str:
    """Of the templates and policies of this fleet."""
    return f"tpufleet-{_digest(fleet)[:8]}-"


def policy(fleet: str, topology: str) -> str:
    return f"{shared_prefix(fleet)}{topology}"


def template(fleet: str, properties: dict[str, Any]) -> str:
    """One per distinct content: a changed setting gives another name."""
    return f"{shared_prefix(fleet)}{_digest(json.dumps(properties, sort_keys=True))[:16]}"


def base_name(slice_id: SliceId) -> str:
    return slice_id[:MAX_BASE_NAME].rstrip("-")


def labels(order: Order, slice_id: SliceId) -> dict[str, str]:
    return {**naming.labels(order), SLICE: naming.label_value(slice_id)}


def new_request_id() -> str:
    return str(uuid.uuid4())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
