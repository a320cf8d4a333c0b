"""Manifests of simulated TPU nodes (KWOK), labelled and tainted as GKE does. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TPU = "google.com/tpu"
POOL = "cloud.google.com/gke-nodepool"
ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY = "cloud.google.com/gke-tpu-topology"
MAX_PODS = "15"
KWOK_ANNOTATIONS = {"kwok.x-k8s.io/node": "fake"}


@dataclass(frozen=True, kw_only=True, slots=True)
class KwokNodePool:
    name: str
    nodes: int
    accelerator: str  # tpu-v5-lite-podslice
    topology: str  # 4x4
    machine_type: str
    chips: int  # per node
    zone: str = "us-central1-a"
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, str]] = ()


def node_manifests(pool: KwokNodePool) -> list[dict[str, Any]]:
    return [_node(pool, index) for index in range(pool.nodes)]


def node_name(pool: str, index: int) -> str:
    return f"gke-{pool}-{index}"


def _node(pool: KwokNodePool, index: int) -> dict[str, Any]:
    name = node_name(pool.name, index)
    resources = {"cpu": "112", "memory": "192Gi", "pods": MAX_PODS, TPU: str(pool.chips)}
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
            },
        },
        "spec": {
            "taints": [
                {"key": TPU, "value": "present", "effect": "NoSchedule"},
                *(dict(taint) for taint in pool.taints),
            ]
        },
        "status": {"allocatable": resources, "capacity": resources},
    }
