"""Manifests of simulated TPU nodes (KWOK), labelled and tainted as GKE does. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpufleet.model.tpu import machine_types

TPU = "google.com/tpu"
POOL = "cloud.google.com/gke-nodepool"
ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY = "cloud.google.com/gke-tpu-topology"
MACHINE_FAMILY = "cloud.google.com/machine-family"
CHIP_COUNT = "cloud.google.com/gke-accelerator-count"
MAX_PODS = "15"
KWOK_ANNOTATIONS = {"kwok.x-k8s.io/node": "fake"}
OTHER_MACHINE = (112, 192)  # CPUs and GiB of a machine type that is in no table


@dataclass(frozen=True, kw_only=True, slots=True)
class KwokNodePool:
    name: str
    nodes: int
    accelerator: str  # tpu-v5-lite-podslice
    topology: str  # 4x4
    machine_type: str
    chips: int  # per node; 0: its device plugin has registered none yet
    zone: str = "us-central1-a"
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, str]] = ()


def node_manifests(pool: KwokNodePool) -> list[dict[str, Any]]:
    return [_node(pool, index) for index in range(pool.nodes)]


def node_name(pool: str, index: int) -> str:
    return f"gke-{pool}-{index}"


def _node(pool: KwokNodePool, index: int) -> dict[str, Any]:
    name = node_name(pool.name, index)
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": dict(KWOK_ANNOTATIONS),
            "labels": {
                **pool.labels,
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                "node.kubernetes.io/instance-type": pool.machine_type,
                "topology.kubernetes.io/zone": pool.zone,
                "topology.kubernetes.io/region": pool.zone.rpartition("-")[0],
                POOL: pool.name,
                ACCELERATOR: pool.accelerator,
                TOPOLOGY: pool.topology,
                MACHINE_FAMILY: pool.machine_type.partition("-")[0],
                CHIP_COUNT: pool.machine_type.rpartition("-")[2].removesuffix("t"),
            },
        },
        "spec": {
            "taints": [
                {"key": TPU, "value": "present", "effect": "NoSchedule"},
                *(dict(taint) for taint in pool.taints),
            ]
        },
        "status": node_resources(pool),
    }


def node_resources(pool: KwokNodePool) -> dict[str, Any]:
    """`capacity` and `allocatable` of a node; without chips if the pool has none."""
    total: tuple[float, float] = OTHER_MACHINE
    free: tuple[float, float] = OTHER_MACHINE
    if pool.machine_type in machine_types.MACHINE_RESOURCES:
        total = machine_types.MACHINE_RESOURCES[pool.machine_type]
        free = machine_types.allocatable(pool.machine_type)
    chips = {TPU: str(pool.chips)} if pool.chips else {}
    return {
        name: {
            "cpu": f"{cpus * 1000:.0f}m",
            "memory": f"{gibibytes * 1024:.0f}Mi",
            "pods": MAX_PODS,
            **chips,
        }
        for name, (cpus, gibibytes) in (("capacity", total), ("allocatable", free))
    }
