"""Validation of TPU node pools as GKE does it. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from tpufleet.model.tpu import machine_types as tpu_machines
from tpufleet.model.tpu import tpu_types
from tpufleet_testbed.gke import api_errors
from tpufleet_testbed.gke.api_errors import invalid_argument

NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
# Topology of a single host, by dimensions and chips.
SINGLE_HOSTS = {(2, 1): "1x1", (2, 4): "2x2", (2, 8): "2x4", (3, 1): "1x1x1", (3, 4): "2x2x1"}
MAX_LABELS = 1024  # characters of the labels in one request
RESERVATION_KEY = "compute.googleapis.com/reservation-name"
PODS_PER_NODE = range(8, 257)
TAG = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
KMS_KEY = re.compile(r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+")
IMAGE_CACHE = "CONTAINER_IMAGE_CACHE"
RESERVED = re.compile(r"(^|\.)(kubernetes\.io|k8s\.io|gke\.io)$")


def machine_types() -> dict[str, tuple[str, int]]:
    """Accelerator label and chip count of each machine type."""
    labels = {prefix: label for _, prefix, _, _, _, _, label in tpu_types.GENERATIONS}
    machines = {}
    for name, _, _, _, chips, machine in tpu_types.TYPES:
        label = labels[name.rpartition("-")[0]]
        if machine is not None and label is not None:
            machines[machine] = (label, chips)
    return machines


def topology_of(pool: Any) -> str:
    """The topology of a pool's slice: explicit, or that of a single host."""
    placement = pool.placement_policy
    if placement.tpu_topology:
        return str(placement.tpu_topology)
    if placement.policy_name:
        return str(placement.policy_name).removeprefix("tpu-provisioner-")
    label, chips = machine_types()[pool.config.machine_type]
    dimensions = {row[6]: row[4] for row in tpu_types.GENERATIONS}[label]
    return SINGLE_HOSTS[dimensions, chips]


def node_count(pool: Any) -> int:
    """Number of nodes; for flex-start, after scale-up."""
    limits = pool.autoscaling
    if pool.config.flex_start:
        return limits.max_node_count or limits.total_max_node_count
    return pool.initial_node_count


def validate(pool: Any, not_offered: Collection[tuple[str, str]] = ()) -> None:
    if not NAME.fullmatch(pool.name):
        raise invalid_argument("name", name=pool.name)
    name = pool.config.machine_type
    machine = machine_types().get(name)
    for zone in pool.locations:
        if machine is None or (zone, name) in not_offered:
            raise invalid_argument("no-machine-type", machine=name, zone=zone)
    assert machine is not None
    validate_labels(pool.config.labels)
    _check_reservation(pool.config.reservation_affinity)
    _check_nodes(pool)
    if pool.config.flex_start:
        _check_flex_start(pool)
    _check_topology(pool, machine[1])


def validate_labels(labels: Mapping[str, str]) -> None:
    length = sum(len(key) + len(value) for key, value in labels.items())
    if length > MAX_LABELS:
        raise invalid_argument("labels-length", length=length, most=MAX_LABELS)
    for key, value in labels.items():
        domain = key.rpartition("/")[0]
        if not KEY.fullmatch(key) or not VALUE.fullmatch(value):
            raise invalid_argument("label", key=key, value=value)
        if RESERVED.search(domain):
            raise invalid_argument("label-reserved", key=key)


def _check_nodes(pool: Any) -> None:
    config, most = pool.config, pool.max_pods_constraint.max_pods_per_node
    if "max_pods_constraint" in pool and most not in PODS_PER_NODE:
        raise invalid_argument("pods-per-node", least=PODS_PER_NODE[0], most=PODS_PER_NODE[-1])
    for tag in config.tags:
        if not TAG.fullmatch(tag):
            raise invalid_argument("tag", tag=tag)
    if config.boot_disk_kms_key and not KMS_KEY.fullmatch(config.boot_disk_kms_key):
        raise invalid_argument("kms-key", key=config.boot_disk_kms_key)
    caches = [disk for disk in config.secondary_boot_disks if disk.mode.name == IMAGE_CACHE]
    if caches and not config.gcfs_config.enabled:
        raise invalid_argument("image-cache")
    if config.spot and config.reservation_affinity.values:
        raise invalid_argument("spot-reservation")
    if len(pool.locations) > 1 and node_count(pool) > 1:
        raise invalid_argument("several-zones")


def _check_reservation(affinity: Any) -> None:
    """Of SPECIFIC_RESERVATION: "Must specify key value fields for specifying the reservations"."""
    specific = affinity.consume_reservation_type.name == "SPECIFIC_RESERVATION"
    if specific and (affinity.key != RESERVATION_KEY or len(affinity.values) != 1):
        raise invalid_argument("reservation-key", key=RESERVATION_KEY)


def unsupported_placement(pool: Any) -> str:
    """GKE's message; empty when Compute Engine can place the nodes."""
    machine, compact = pool.config.machine_type, pool.placement_policy.type_.name == "COMPACT"
    if machine.startswith("tpu7x-") and compact:
        return api_errors.text("workload-policy-required", machine=machine)
    return ""


def unsupported_disk(pool: Any) -> str:
    """GKE's message; empty when the machines can have such boot disks."""
    machine, disk = pool.config.machine_type, pool.config.disk_type
    if tpu_machines.can_have_disk(machine, disk):
        return ""
    return api_errors.text("disk", disk=disk, machine=machine)


def _check_flex_start(pool: Any) -> None:
    if not pool.autoscaling.enabled:
        raise invalid_argument("flex-start-without-autoscaling")
    if pool.initial_node_count:
        raise invalid_argument("flex-start-with-nodes")
    if pool.config.spot or pool.config.reservation_affinity.values or pool.management.auto_repair:
        raise invalid_argument("flex-start-capacity")
    if pool.autoscaling.location_policy.name == "BALANCED":
        raise invalid_argument("flex-start-location")
    if pool.config.reservation_affinity.consume_reservation_type.name == "ANY_RESERVATION":
        raise invalid_argument("flex-start-reservation")


def _check_topology(pool: Any, chips: int) -> None:
    placement, nodes = pool.placement_policy, node_count(pool)
    if nodes == 1 and (placement.tpu_topology or placement.policy_name):
        raise invalid_argument("single-host-topology")
    if not placement.tpu_topology and not placement.policy_name and nodes != 1:
        raise invalid_argument("no-topology")
    product = math.prod(int(size) for size in topology_of(pool).split("x"))
    limits = pool.autoscaling
    if limits.enabled and nodes > 1 and limits.max_node_count * chips != product:
        raise invalid_argument(
            "slice-size", nodes=limits.max_node_count, topology=topology_of(pool)
        )
    if product != nodes * chips:
        raise invalid_argument(
            "chips", topology=topology_of(pool), product=product, nodes=nodes, chips=chips
        )
