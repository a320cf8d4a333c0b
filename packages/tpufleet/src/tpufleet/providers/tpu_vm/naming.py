"""Names in the cloud: ids of nodes and queued resources, labels, metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import msgspec

from tpufleet.errors import BadRequest, not_found
from tpufleet.model.fleet import fleets
from tpufleet.model.fleet.slices import SliceId
from tpufleet.providers.base import Order

FLEET, SLICE, ORDER, JOB, POOL, CAPACITY = (
    f"tpufleet-{key}" for key in ("fleet", "slice", "order", "job", "pool", "capacity")
)
# Labels of a node that a person made: the slice it was adopted as, and its name, or that of its
# group. Such a node is never deleted.
ADOPTED, NODE = "tpufleet-adopted", "tpufleet-node"
# What adoption replaced in the metadata of such a node, as JSON.
FORMER_METADATA = "tpufleet-former"
SLICES, TOKENS, SERVER = "tpufleet-slices", "tpufleet-tokens", "tpufleet-server"
HOSTS, ACCELERATOR = "tpufleet-hosts", "tpufleet-accelerator"
# Of Compute Engine: lets a host write guest attributes.
GUEST_ATTRIBUTES = "enable-guest-attributes"
BUNDLE, BUNDLE_SHA256 = "tpufleet-bundle", "tpufleet-bundle-sha256"
CA_CERTIFICATES = "tpufleet-ca"
HTTPS_PROXY, NO_PROXY = "tpufleet-https-proxy", "tpufleet-no-proxy"
MOUNTS, GCSFUSE = "tpufleet-mounts", "tpufleet-gcsfuse"
CONTAINERS, FORMAT_DISKS = "tpufleet-containers", "tpufleet-format-disks"
NODE_ID = fleets.NODE_ID
_NOT_IN_LABELS = re.compile(r"[^a-z0-9_-]")


class TpuLocation(msgspec.Struct, frozen=True, kw_only=True):
    project: str
    zone: str

    @property
    def path(self) -> str:
        return f"projects/{self.project}/locations/{self.zone}"

    def node(self, node_id: str) -> str:
        return f"{self.path}/nodes/{node_id}"

    def queued(self, queued_id: str) -> str:
        return f"{self.path}/queuedResources/{queued_id}"


def no_such_node(name: str, zone: str, listing: str = "vm fleet list") -> BadRequest:
    return BadRequest(str(not_found(f"TPU VM in {zone}", name, listing)))


def of_another_fleet(name: str, zone: str) -> BadRequest:
    return BadRequest(f"TPU VM {name} in {zone} belongs to another fleet")


def short_name(name: str) -> str:
    return name.rpartition("/")[2]


def gang_prefix(order: Order) -> str:
    """The nodes of a gang are named {prefix}-0, {prefix}-1, …; like their slices if possible."""
    first = order.slices[0]
    prefix = first.removesuffix("-0")
    if list(order.slices) == [f"{prefix}-{index}" for index in range(len(order.slices))]:
        return prefix
    return f"tpf-{_NOT_IN_LABELS.sub('-', order.id.lower())}"[:60].rstrip("-")


def queued_id(order: Order) -> str:
    return order.slices[0] if len(order.slices) == 1 else gang_prefix(order)


def labels(order: Order) -> dict[str, str]:
    """For people and billing. Exact values are in the metadata."""
    values = {
        FLEET: order.fleet,
        ORDER: order.id,
        CAPACITY: order.capacity.value,
        SLICE: order.slices[0] if len(order.slices) == 1 else "",
        JOB: order.job_id or "",
        POOL: order.pool or "",
    }
    return {key: label_value(value) for key, value in values.items() if value}


def end_of_slice(labels: Mapping[str, str], name: str) -> str:
    """The command with which its server ends the slice; empty: it is none of a job or pool."""
    if ADOPTED in labels:
        return f"tpu adopt undo {labels.get(NODE, name)}"
    job, pool = labels.get(JOB), labels.get(POOL)
    return f"tpu cancel {job}" if job else f"tpu pool delete {pool}" if pool else ""


def label_value(text: str) -> str:
    return _NOT_IN_LABELS.sub("-", text.lower())[:63]


def metadata(order: Order) -> dict[str, str]:
    """What hosts need to know: the gang's slices in the order of its nodes."""
    values = {
        SERVER: order.server_url,
        SLICES: json.dumps(list(order.slices)),
        TOKENS: json.dumps(order.tokens),
    }
    if order.ca_certificates:
        values[CA_CERTIFICATES] = order.ca_certificates
    if order.mounts:
        values[MOUNTS] = "\n".join(order.mounts)
    if order.mounts or order.pool:  # which jobs a pool will run is not known yet
        values[GCSFUSE] = "yes"
    return values


def slices_of(metadata: Mapping[str, str]) -> tuple[SliceId, ...]:
    """Empty if the metadata is missing or invalid."""
    try:
        names = json.loads(metadata.get(SLICES, "[]"))
    except ValueError:
        return ()
    return tuple(SliceId(str(name)) for name in names) if isinstance(names, list) else ()


def slice_of_node(node_id: str, slices: Sequence[SliceId]) -> SliceId:
    """The slice of a node: of the same name, or by the node's index in its gang."""
    if len(slices) <= 1:
        return slices[0] if slices else SliceId(node_id)
    number = node_id.rpartition("-")[2]
    if number.isdecimal() and int(number) < len(slices):
        return slices[int(number)]
    return SliceId(node_id)
