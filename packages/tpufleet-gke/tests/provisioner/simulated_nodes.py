"""Nodes and a scheduler without a cluster: enough of Kubernetes to see which pods a pool serves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from tpufleet.clocks import Clock
from tpufleet.kubernetes import quantities
from tpufleet_gke.provisioner.model import label_keys
from tpufleet_testbed.gke import kwok_backend
from tpufleet_testbed.kubernetes import kwok_nodes

# Set by GKE's admission (ExtendedResourceToleration) on pods that request the resource.
IMPLIED_TOLERATIONS = (kwok_nodes.TPU,)


@dataclass(slots=True)
class SimulatedNodes:
    """The node backend of an emulated GKE. Nodes are ready when they are there."""

    clock: Clock
    exclusive: bool = False  # one Job on a pool, as JobSet's exclusive topology
    late: timedelta = timedelta(0)  # until the API server shows new nodes
    without_chips: set[str] = field(default_factory=set)  # pools
    drained: set[str] = field(default_factory=set)  # pools
    cordoned: dict[str, str] = field(default_factory=dict)  # nodes, with the annotation
    created: dict[str, list[tuple[Any, datetime]]] = field(default_factory=dict)  # by pool
    _shown: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # by name: from what, the node

    def create_nodes(self, pool: Any, *, chips: bool = True) -> None:
        manifests = kwok_nodes.node_manifests(kwok_backend.kwok_node_pool(pool))
        self.created[pool.name] = [(manifest, self.clock.now()) for manifest in manifests]
        if not chips:
            self.without_chips.add(pool.name)

    def register_chips(self, pool: Any) -> None:
        self.without_chips.discard(pool.name)

    def drain_nodes(self, pool: str) -> None:
        self.drained.add(pool)

    def delete_nodes(self, pool: str) -> None:
        for manifest, _ in self.created.pop(pool, ()):
            self.cordoned.pop(manifest["metadata"]["name"], None)
        self.without_chips.discard(pool)
        self.drained.discard(pool)

    def relabel_nodes(self, pool: Any) -> None:
        manifests = kwok_nodes.node_manifests(kwok_backend.kwok_node_pool(pool))
        created = [at for _, at in self.created[pool.name]]
        self.created[pool.name] = list(zip(manifests, created, strict=True))

    def all(self) -> list[Any]:
        shown = self.clock.now() - self.late
        return [
            self._node(manifest, created_at)
            for of_pool in list(self.created.values())
            for manifest, created_at in of_pool
            if created_at <= shown
        ]

    def schedule(self, pods: list[Any]) -> None:
        """Bind each pod to a node that fits it, or say in its condition why none does."""
        nodes = self.all()
        names = {
            node["metadata"]["name"]
            for node in nodes
            if node["metadata"]["labels"][kwok_nodes.POOL] not in self.drained
        }
        for pod in pods:
            if pod["spec"].get("nodeName") and pod["spec"]["nodeName"] not in names:
                del pod["spec"]["nodeName"]
                pod["status"] = {"phase": "Pending"}
        pool_of = {
            node["metadata"]["name"]: node["metadata"]["labels"][kwok_nodes.POOL] for node in nodes
        }
        taken = {pod["spec"].get("nodeName") for pod in pods}
        taken_pools = {pool_of.get(name) for name in taken} if self.exclusive else set()
        for pod in pods:
            if pod["spec"].get("nodeName"):
                continue
            reasons: Counter[str] = Counter()
            misfits: dict[tuple[str, bool], str] = {}  # the nodes of a pool are alike
            for node in nodes:
                name = node["metadata"]["name"]
                kind = pool_of[name], bool(node["spec"].get("unschedulable"))
                if kind not in misfits:
                    misfits[kind] = misfit(pod, node)
                reason = misfits[kind] or (
                    f"Insufficient {kwok_nodes.TPU}"
                    if name in taken or pool_of[name] in taken_pools
                    else ""
                )
                if not reason:
                    pod["spec"]["nodeName"] = name
                    pod["status"] = {"phase": "Running"}
                    taken.add(name)
                    if self.exclusive:
                        taken_pools.add(pool_of[name])
                    break
                reasons[reason] += 1
            else:
                counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
                pod["status"] = unschedulable(f"0/{len(nodes)} nodes are available: {counts}.")

    def _node(self, manifest: Any, created_at: datetime) -> Any:
        name, pool = manifest["metadata"]["name"], manifest["metadata"]["labels"][kwok_nodes.POOL]
        state = (
            id(manifest), created_at, pool in self.without_chips, pool in self.drained,
            self.cordoned.get(name),
        )  # fmt: skip
        if self._shown.get(name, (None,))[0] != state:
            self._shown[name] = state, self._new_node(manifest, created_at)
        return self._shown[name][1]

    def _new_node(self, manifest: Any, created_at: datetime) -> Any:
        allocatable = dict(manifest["status"]["allocatable"])
        if manifest["metadata"]["labels"][kwok_nodes.POOL] in self.without_chips:
            del allocatable[kwok_nodes.TPU]
        created = created_at.isoformat().replace("+00:00", "Z")
        metadata = manifest["metadata"]
        cordoned = self.cordoned.get(metadata["name"])
        drained = metadata["labels"][kwok_nodes.POOL] in self.drained
        marks = {label_keys.CORDONED_AT: cordoned} if cordoned else {}
        closed = {"unschedulable": True} if cordoned or drained else {}
        return {
            **manifest,
            "spec": {**manifest["spec"], **closed},
            "metadata": {
                **metadata,
                "creationTimestamp": created,
                "annotations": {**metadata["annotations"], **marks},
            },
            "status": {
                "allocatable": allocatable,
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }


def unschedulable(message: str) -> dict[str, Any]:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
    }
    return {"phase": "Pending", "conditions": [condition]}


def misfit(pod: Any, node: Any) -> str:
    """The scheduler's reason, in its words; empty when the pod fits the empty node."""
    if node["spec"].get("unschedulable"):
        return "node(s) were unschedulable"
    labels = node["metadata"]["labels"]
    selector = pod["spec"].get("nodeSelector") or {}
    if any(labels.get(key) != value for key, value in selector.items()):
        return "node(s) didn't match Pod's node affinity/selector"
    tolerated = {one.get("key") for one in pod["spec"].get("tolerations") or ()}
    for taint in node["spec"]["taints"]:
        if taint["key"] not in tolerated | set(IMPLIED_TOLERATIONS):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint['value']}}}"
    allocatable = node["status"]["allocatable"]
    for container in pod["spec"]["containers"]:
        for resource, amount in container["resources"]["requests"].items():
            if quantities.parse(allocatable.get(resource, "0")) < quantities.parse(amount):
                return f"Insufficient {resource}"
    return ""
