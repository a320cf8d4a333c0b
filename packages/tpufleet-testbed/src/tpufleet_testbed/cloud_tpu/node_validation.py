"""Rejects nodes that the Cloud TPU API rejects: ids, types, labels, tags, metadata and disks.

Limits: cloud.google.com/compute/docs/metadata/setting-custom-metadata,
cloud.google.com/compute/docs/labeling-resources, cloud.google.com/vpc/docs/add-remove-network-tags,
and the comments of google.cloud.tpu.v2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_network
from typing import Any

from google.cloud.tpu_v2.types import cloud_tpu

from tpufleet.errors import BadInput
from tpufleet.model.tpu import tpu_zones, type_lookup
from tpufleet.model.tpu.type_lookup import Accelerator
from tpufleet_testbed.cloud_tpu import catalog
from tpufleet_testbed.cloud_tpu.api_errors import bad_request, invalid_argument
from tpufleet_testbed.servers import ApiError

LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
MAX_LABELS = 64
NODE_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
# Of queued resources, and of nodes named in them.
RESOURCE_ID = re.compile(r"[A-Za-z0-9_.~+%-]+")
RESERVATION = re.compile(r"projects/[^/]+/locations/[^/]+/reservations/[^/]+")
TAG = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
MAX_TAGS = 64
METADATA_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")
METADATA_VALUE_BYTES = 256 * 1024
METADATA_BYTES = 512 * 1024
MAX_DESCRIPTION = 512
# Of a network or subnetwork: a name, or a partial or full URL.
NETWORK = re.compile(
    r"(?:(?:https://(?:www|compute)\.googleapis\.com/compute/[a-z0-9]+/)?(?:projects/[^/]+/)?"
    r"(?:global/networks|regions/[^/]+/subnetworks)/)?[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?"
)
DISK = re.compile(r"projects/[^/]+/(?:zones|regions)/(?P<location>[^/]+)/disks/[^/]+")
# With the boot disk: cloud.google.com/tpu/docs/attach-durable-block-storage
MAX_DISKS, MAX_DISKS_V6E = 128, 32
READ_WRITE: Any = cloud_tpu.AttachedDisk.DiskMode.READ_WRITE


def validate(
    node_id: str, node: cloud_tpu.Node, zone: str, id_pattern: re.Pattern[str] = NODE_ID
) -> Accelerator:
    if not id_pattern.fullmatch(node_id):
        raise invalid_argument(f"The node id {node_id!r} is not valid.")
    accelerator = _accelerator(node, zone)
    if not node.runtime_version:
        raise invalid_argument('The field "RuntimeVersion" is required.')
    if node.runtime_version not in catalog.RUNTIME_VERSIONS:
        raise invalid_argument(f'The field "RuntimeVersion" cannot be "{node.runtime_version}".')
    if node.network_configs and "network_config" in node:
        raise invalid_argument("network_config and network_configs are mutually exclusive.")
    scheduling = node.scheduling_config
    if scheduling.reserved and (scheduling.spot or scheduling.preemptible):
        raise invalid_argument("A reserved node cannot be spot or preemptible.")
    if scheduling.spot and scheduling.preemptible:  # the reference does not say; neither do we ask
        raise invalid_argument("A node cannot be both spot and preemptible.")
    for url in (node.network_config.network, node.network_config.subnetwork):
        if url and not NETWORK.fullmatch(url):
            raise invalid_argument(f'The network "{url}" is not valid. The URL is malformed.')
    if node.cidr_block and not _is_29(node.cidr_block):
        raise invalid_argument(f"The CIDR block {node.cidr_block} is not a /29 block.")
    check_editable(node)
    check_disks(node.data_disks, accelerator, zone)
    return accelerator


def check_editable(node: cloud_tpu.Node) -> None:
    """Fields that UpdateNode may change too."""
    if len(node.description) > MAX_DESCRIPTION:
        raise invalid_argument(f"The description has more than {MAX_DESCRIPTION} characters.")
    _check_labels(node.labels)
    _check_tags(node.tags)
    _check_metadata(node.metadata)


def check_disks(
    disks: Iterable[cloud_tpu.AttachedDisk], accelerator: Accelerator, zone: str
) -> None:
    disks = list(disks)
    most = MAX_DISKS_V6E if accelerator.generation == "v6e" else MAX_DISKS
    if len(disks) + 1 > most:
        raise invalid_argument(
            f"A host of {accelerator.name} has {most} disks at most, with its boot disk."
        )
    for disk in disks:
        match = DISK.fullmatch(disk.source_disk)
        if match is None:
            raise invalid_argument(f'The disk "{disk.source_disk}" is not the full path of a disk.')
        if match["location"] not in (zone, zone.rpartition("-")[0]):
            raise invalid_argument(f'The disk "{disk.source_disk}" is not in zone {zone}.')
        if accelerator.hosts > 1 and is_writable(disk):
            raise invalid_argument(
                f'The disk "{disk.source_disk}" must be read-only: {accelerator.name} has several '
                "hosts."
            )


def is_writable(disk: cloud_tpu.AttachedDisk) -> bool:
    return disk.mode is not cloud_tpu.AttachedDisk.DiskMode.READ_ONLY  # the default is read-write


def _accelerator(node: cloud_tpu.Node, zone: str) -> Accelerator:
    name = node.accelerator_type
    if not name and "accelerator_config" in node:
        name = _name_of(node.accelerator_config, zone)
    if not name:
        raise invalid_argument('The field "AcceleratorType" is required.')
    try:
        accelerator = type_lookup.find(name)
    except BadInput as error:
        raise _type_not_found(name, zone) from error
    if accelerator.name != name or not accelerator.runtime:
        raise _type_not_found(name, zone)
    if not tpu_zones.is_offered(name, zone):
        raise _type_not_found(name, zone)
    return accelerator


def _name_of(config: cloud_tpu.AcceleratorConfig, zone: str) -> str:
    wanted = cloud_tpu.AcceleratorConfig.Type(config.type_).name
    for name, accelerator in type_lookup.all_types().items():
        kind = catalog.CONFIG_TYPES.get(accelerator.generation)
        if kind == wanted and accelerator.topology == config.topology:
            return name
    raise _type_not_found(f"{wanted} {config.topology}", zone)


def _type_not_found(name: str, zone: str) -> ApiError:
    return bad_request(
        f'The requested accelerator configuration for accelerator type, "{name}", could not be '
        f'found in the zonal accelerator configurations for "{zone}".; the accelerator {name} was '
        f"not found in zone {zone}"
    )


def _check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > MAX_LABELS:
        raise invalid_argument(f"The resource has more than {MAX_LABELS} labels.")
    for key, value in labels.items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            raise invalid_argument(f"The label {key}={value} is not valid.")


def _check_tags(tags: Sequence[str]) -> None:
    if len(tags) > MAX_TAGS:
        raise invalid_argument(f"The node has more than {MAX_TAGS} network tags.")
    for tag in tags:
        if not TAG.fullmatch(tag):
            raise invalid_argument(f"The network tag {tag!r} is not valid.")


def _check_metadata(metadata: Mapping[str, str]) -> None:
    for key, value in metadata.items():
        if not METADATA_KEY.fullmatch(key):
            raise invalid_argument(f"The metadata key {key[:140]!r} is not valid.")
        if len(value.encode()) > METADATA_VALUE_BYTES:
            raise invalid_argument(f"The metadata value of {key!r} is too large.")
    if sum(len(value.encode()) for value in metadata.values()) > METADATA_BYTES:
        raise invalid_argument("The metadata is too large.")


def _is_29(block: str) -> bool:
    try:
        return ip_network(block).prefixlen == 29
    except ValueError:
        return False
