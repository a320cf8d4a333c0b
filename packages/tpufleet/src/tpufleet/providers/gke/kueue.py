"""Kueue manifests: resource flavors, queues with quota, priority classes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.model.tpu import type_lookup
from tpufleet.model.tpu.type_lookup import Accelerator
from tpufleet.providers.gke import keys

Json = dict[str, Any]

KUEUE_API_VERSION = "kueue.x-k8s.io/v1beta2"
# Upstream's five priority classes. manifests.priority_class chooses among them.
PRIORITY_VALUES = {"verylow": 100, "low": 250, "medium": 500, "high": 750, "veryhigh": 1000}
MAX_FLAVORS = 64  # Kueue's limit for one ClusterQueue
# Only chips are limited; cpu and memory are listed because Kueue admits covered resources only.
UNLIMITED = {"cpu": "1000000", "memory": "1000000Gi"}


# Topology-aware scheduling: https://kueue.sigs.k8s.io/docs/concepts/topology_aware_scheduling/
# A multi-host slice is one node pool.
TOPOLOGY = "tpu-slices"
LEVELS = ("topology.kubernetes.io/zone", keys.POOL, "kubernetes.io/hostname")


def slice_topology() -> Json:
    return {
        "apiVersion": KUEUE_API_VERSION,
        "kind": "Topology",
        "metadata": {"name": TOPOLOGY},
        "spec": {"levels": [{"nodeLabel": label} for label in LEVELS]},
    }


def topology_annotations(accelerator: Accelerator) -> dict[str, str]:
    """Of the pods of a job with one or more slices: each slice in one node pool, all of them in one
    zone where possible."""
    return {
        "kueue.x-k8s.io/podset-preferred-topology": LEVELS[0],
        "kueue.x-k8s.io/podset-slice-required-topology": keys.POOL,
        "kueue.x-k8s.io/podset-slice-size": str(accelerator.hosts),
    }


def priority_classes() -> list[Json]:
    return [
        {
            "apiVersion": KUEUE_API_VERSION,
            "kind": "WorkloadPriorityClass",
            "metadata": {"name": name},
            "value": value,
            "description": f"Jobs of {name} priority.",
        }
        for name, value in PRIORITY_VALUES.items()
    ]


def flavors() -> list[Json]:
    """One for each accelerator type that GKE offers."""
    return [
        _flavor(accelerator)
        for accelerator in type_lookup.all_types().values()
        if accelerator.gke_accelerator
    ]


def flavor_name(accelerator: Accelerator) -> str:
    return accelerator.name


def cluster_queue(quota: Mapping[str, int], *, name: str = "cluster-queue") -> Json:
    """`quota`: the largest number of slices in use, by accelerator type."""
    if not 0 < len(quota) <= MAX_FLAVORS:
        raise BadInput(f"{len(quota)} TPU types; a ClusterQueue takes 1 to {MAX_FLAVORS}")
    spec: Json = {
        "namespaceSelector": {"matchLabels": {"tpufleet.dev/jobs": "true"}},
        "queueingStrategy": "BestEffortFIFO",
        "preemption": {
            "withinClusterQueue": "LowerPriority",
            "reclaimWithinCohort": "LowerPriority",
        },
        "resourceGroups": [
            {
                "coveredResources": ["google.com/tpu", *UNLIMITED],
                "flavors": [
                    _quota(type_lookup.find(kind), slices) for kind, slices in quota.items()
                ],
            }
        ],
    }
    return {
        "apiVersion": KUEUE_API_VERSION,
        "kind": "ClusterQueue",
        "metadata": {"name": name},
        "spec": spec,
    }


def local_queue(
    namespace: str, *, name: str = "tpu-training-jobs", cluster_queue: str = "cluster-queue"
) -> Json:
    return {
        "apiVersion": KUEUE_API_VERSION,
        "kind": "LocalQueue",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"clusterQueue": cluster_queue},
    }


def _flavor(accelerator: Accelerator) -> Json:
    return {
        "apiVersion": KUEUE_API_VERSION,
        "kind": "ResourceFlavor",
        "metadata": {"name": flavor_name(accelerator)},
        "spec": {
            "nodeLabels": {
                "cloud.google.com/gke-tpu-accelerator": accelerator.gke_accelerator,
                "cloud.google.com/gke-tpu-topology": accelerator.topology,
            },
            "tolerations": [
                {"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}
            ],
        },
    }


def _quota(accelerator: Accelerator, slices: int) -> Json:
    resources = [{"name": "google.com/tpu", "nominalQuota": accelerator.chips * slices}]
    resources += [{"name": name, "nominalQuota": amount} for name, amount in UNLIMITED.items()]
    return {"name": flavor_name(accelerator), "resources": resources}
