"""Kueue's objects for our types, quotas and priorities, as data. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.model import topology
from tpufleet.model.topology import Accelerator

Json = dict[str, Any]

KUEUE_API_VERSION = "kueue.x-k8s.io/v1beta2"
# The five of old, whose names workloads carry. manifests.priority_class chooses among them.
PRIORITY_VALUES = {"verylow": 100, "low": 250, "medium": 500, "high": 750, "veryhigh": 1000}
MAX_FLAVORS = 64  # Kueue's bound for one ClusterQueue
# Chips are what is scarce; cpu and memory are covered so that pods that ask for them are admitted.
UNLIMITED = {"cpu": "1000000", "memory": "1000000Gi"}


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
    """One for every type that GKE has."""
    return [_flavor(found) for found in topology.all_types().values() if found.gke_accelerator]


def flavor_name(found: Accelerator) -> str:
    return found.name


def cluster_queue(
    quota: Mapping[str, int], *, name: str = "cluster-queue", cohort: str = ""
) -> Json:
    """`quota`: slices of each type that may be in use at a time."""
    if not 0 < len(quota) <= MAX_FLAVORS:
        raise BadInput(f"a ClusterQueue takes 1 to {MAX_FLAVORS} types, not {len(quota)}")
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
                "flavors": [_quota(topology.find(kind), slices) for kind, slices in quota.items()],
            }
        ],
    }
    if cohort:
        spec["cohortName"] = cohort
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


def _flavor(found: Accelerator) -> Json:
    return {
        "apiVersion": KUEUE_API_VERSION,
        "kind": "ResourceFlavor",
        "metadata": {"name": flavor_name(found)},
        "spec": {
            "nodeLabels": {
                "cloud.google.com/gke-tpu-accelerator": found.gke_accelerator,
                "cloud.google.com/gke-tpu-topology": found.topology,
            },
            "tolerations": [
                {"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}
            ],
        },
    }


def _quota(found: Accelerator, slices: int) -> Json:
    resources = [{"name": "google.com/tpu", "nominalQuota": found.chips * slices}]
    resources += [{"name": name, "nominalQuota": amount} for name, amount in UNLIMITED.items()]
    return {"name": flavor_name(found), "resources": resources}


def manifest_files(namespace: str = "tpu-training") -> dict[str, list[Json]]:
    """What deploy/k8s/queues holds."""
    return {
        "flavors.yaml": flavors(),
        "priorities.yaml": priority_classes(),
        "queue.yaml": [cluster_queue({"v5litepod-16": 2}), local_queue(namespace)],
    }
