"""Kueue objects of an environment: flavors, a ClusterQueue per team in one cohort, priorities.

Quotas are derived from the pools, so that they cannot disagree with them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tpufleet.model.tpu import machine_types, type_lookup
from tpufleet.model.tpu.type_lookup import Accelerator
from tpufleet.providers.gke import keys, kueue
from tpufleet_gke.environment.addons import compute_classes
from tpufleet_gke.environment.config import capacity, names
from tpufleet_gke.environment.config.sections import Environment, Team

Json = dict[str, Any]

SHARED_COHORT = "tpufleet"
ADMISSION_CHECK = "flex-start"
# https://cloud.google.com/kubernetes-engine/docs/how-to/provisioningrequest
PROVISIONING_CLASS = "queued-provisioning.gke.io"
PROVISIONING_LABEL = "autoscaling.gke.io/provisioning-request"  # of the nodes
# A team that lends takes its slices back from borrowers, whatever their priority.
PREEMPTION = {
    "withinClusterQueue": "LowerPriority",
    "reclaimWithinCohort": "Any",
    "borrowWithinCohort": {"policy": "LowerPriority"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flavor:
    """Slices of one type and kind of capacity."""

    kind: Accelerator
    capacity: str
    slices: int
    topology_aware: bool = False
    compute_class: str = ""
    queued: bool = False  # its node pools have queued provisioning; those of the provisioner do not

    @property
    def name(self) -> str:
        suffix = {"spot": "-spot", "flex-start": "-flex-start"}.get(self.capacity, "")
        return kueue.flavor_name(self.kind) + suffix

    @property
    def node_labels(self) -> Json:
        if self.compute_class:
            return {keys.COMPUTE_CLASS: self.compute_class}
        selected = {"spot": keys.SPOT, "flex-start": keys.FLEX_START}.get(self.capacity)
        return {
            "cloud.google.com/gke-tpu-accelerator": self.kind.gke_accelerator,
            "cloud.google.com/gke-tpu-topology": self.kind.topology,
            **({selected: "true"} if selected else {}),
        }


def manifests(environment: Environment) -> list[Json]:
    """In the order in which they can be applied."""
    found = flavors(environment)
    if not found:
        return list(kueue.priority_classes())
    flexible = any(flavor.queued for flavor in found)
    shares = quota_shares(environment)
    return [
        *kueue.priority_classes(),
        *([kueue.slice_topology()] if any(flavor.topology_aware for flavor in found) else []),
        *compute_classes.manifests(environment),
        *(_resource_flavor(flavor) for flavor in found),
        *(_provisioning() if flexible else []),
        _cohort(environment, found, shares),
        *(
            _cluster_queue(environment, name, team, found, shares[name])
            for name, team in environment.teams.items()
        ),
        *(
            kueue.local_queue(
                names.team_namespace(name, team), name=team.queue, cluster_queue=queue_name(name)
            )
            for name, team in environment.teams.items()
        ),
    ]


def flavors(environment: Environment) -> list[Flavor]:
    """On demand and reserved first: Kueue tries flavors in their order."""
    slices: dict[tuple[str, str], int] = {}
    aware: set[tuple[str, str]] = set()
    queued: set[tuple[str, str]] = set()
    classes = compute_classes.class_names(environment)
    for pool in environment.tpu_pools.values():
        key = capacity.flavor_key(pool)
        slices[key] = slices.get(key, 0) + pool.slices
        if pool.topology_aware:
            aware.add(key)
        if pool.capacity == "flex-start" and pool.managed_by == "terraform":
            queued.add(key)
    order = ("on-demand", "spot", "flex-start", "compute-class")
    return [
        Flavor(
            kind=type_lookup.find(kind),
            capacity=found,
            slices=count,
            topology_aware=(kind, found) in aware,
            compute_class=classes[kind] if found == "compute-class" else "",
            queued=(kind, found) in queued,
        )
        for (kind, found), count in sorted(
            slices.items(), key=lambda item: (order.index(item[0][1]), item[0][0])
        )
    ]


def quota_shares(environment: Environment) -> dict[str, dict[str, int]]:
    """Guaranteed slices by team and flavor. A quota in cluster.yaml counts slices of a type, and
    takes them from the flavors in order; a type without quotas is shared by weight, rounded down.
    What remains belongs to the cohort: whoever asks first."""
    shares: dict[str, dict[str, int]] = {name: {} for name in environment.teams}
    left = {flavor.name: flavor.slices for flavor in flavors(environment)}
    for kind in capacity.slices_by_type(environment):
        found = [flavor for flavor in flavors(environment) if flavor.kind.name == kind]
        total = sum(flavor.slices for flavor in found)
        stated = any(kind in team.quota for team in environment.teams.values())
        weights = sum(team.weight for team in environment.teams.values())
        for name, team in environment.teams.items():
            wanted = team.quota.get(kind, 0) if stated else total * team.weight // weights
            for flavor in found:
                taken = min(wanted, left[flavor.name])
                shares[name][flavor.name] = taken
                left[flavor.name] -= taken
                wanted -= taken
    return shares


def queue_name(team: str) -> str:
    return team


def _resource_flavor(flavor: Flavor) -> Json:
    return {
        "apiVersion": kueue.KUEUE_API_VERSION,
        "kind": "ResourceFlavor",
        "metadata": {"name": flavor.name},
        "spec": {
            "nodeLabels": flavor.node_labels,
            "tolerations": list(_tolerations(flavor)),
            **({"topologyName": kueue.TOPOLOGY} if flavor.topology_aware else {}),
        },
    }


def _tolerations(flavor: Flavor) -> Iterator[Json]:
    yield {"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}
    tainted = {"spot": keys.SPOT, "flex-start": keys.QUEUED}.get(flavor.capacity)
    if tainted:
        yield {"key": tainted, "operator": "Equal", "value": "true", "effect": "NoSchedule"}


def _cluster_queue(
    environment: Environment, name: str, team: Team, found: list[Flavor], shares: dict[str, int]
) -> Json:
    spec: Json = {
        "namespaceSelector": {
            "matchLabels": {"kubernetes.io/metadata.name": names.team_namespace(name, team)}
        },
        "cohortName": SHARED_COHORT,
        "queueingStrategy": "BestEffortFIFO",
        "preemption": PREEMPTION,
        "fairSharing": {"weight": str(team.weight)},
        "resourceGroups": [
            {
                "coveredResources": ["google.com/tpu", "cpu", "memory"],
                "flavors": [
                    _flavor_quota(flavor, shares.get(flavor.name, 0), team) for flavor in found
                ],
            }
        ],
    }
    flexible = [flavor.name for flavor in found if flavor.queued]
    if flexible:
        rule = {"name": ADMISSION_CHECK, "onFlavors": flexible}
        spec["admissionChecksStrategy"] = {"admissionChecks": [rule]}
    return {
        "apiVersion": kueue.KUEUE_API_VERSION,
        "kind": "ClusterQueue",
        "metadata": {"name": queue_name(name)},
        "spec": spec,
    }


def _flavor_quota(flavor: Flavor, slices: int, team: Team | None = None) -> Json:
    resources = []
    for resource, amount in _resources(flavor.kind, slices).items():
        entry: Json = {"name": resource, "nominalQuota": amount}
        if team is not None and not team.borrow:
            entry["borrowingLimit"] = _zero(resource)
        if team is not None and not team.lend:
            entry["lendingLimit"] = _zero(resource)
        resources.append(entry)
    return {"name": flavor.name, "resources": resources}


def _resources(kind: Accelerator, slices: int) -> Json:
    """Chips, CPUs and memory of whole slices."""
    cpus, gibibytes = machine_types.MACHINE_RESOURCES[str(kind.machine_type)]
    hosts = kind.hosts * slices
    return {
        "google.com/tpu": kind.chips * slices,
        "cpu": cpus * hosts,
        "memory": f"{gibibytes * hosts}Gi",
    }


def _zero(resource: str) -> Any:
    return "0Gi" if resource == "memory" else 0


def _cohort(
    environment: Environment, found: list[Flavor], shares: dict[str, dict[str, int]]
) -> Json:
    """Slices that no team is guaranteed."""
    rest = [
        (flavor, flavor.slices - sum(share.get(flavor.name, 0) for share in shares.values()))
        for flavor in found
    ]
    return {
        "apiVersion": kueue.KUEUE_API_VERSION,
        "kind": "Cohort",
        "metadata": {"name": SHARED_COHORT},
        "spec": {
            "resourceGroups": [
                {
                    "coveredResources": ["google.com/tpu", "cpu", "memory"],
                    "flavors": [_flavor_quota(flavor, slices) for flavor, slices in rest],
                }
            ]
        },
    }


def _provisioning() -> list[Json]:
    """Flex-start slices are requested as a whole, and a workload starts when they are there."""
    api = kueue.KUEUE_API_VERSION
    return [
        {
            "apiVersion": api,
            "kind": "ProvisioningRequestConfig",
            "metadata": {"name": ADMISSION_CHECK},
            "spec": {
                "provisioningClassName": PROVISIONING_CLASS,
                "managedResources": ["google.com/tpu"],
                # The nodes of this request, and not those that another workload waits for.
                "podSetUpdates": {
                    "nodeSelector": [
                        {
                            "key": PROVISIONING_LABEL,
                            "valueFromProvisioningClassDetail": "ResizeRequestName",
                        }
                    ]
                },
            },
        },
        {
            "apiVersion": api,
            "kind": "AdmissionCheck",
            "metadata": {"name": ADMISSION_CHECK},
            "spec": {
                "controllerName": "kueue.x-k8s.io/provisioning-request",
                "parameters": {
                    "apiGroup": "kueue.x-k8s.io",
                    "kind": "ProvisioningRequestConfig",
                    "name": ADMISSION_CHECK,
                },
            },
        },
    ]
