"""Nodes of an emulated node pool, as KWOK nodes of a local control plane."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tpufleet.errors import Conflict
from tpufleet.kubernetes.connections import NODE, POD, Connection
from tpufleet.model.fleet import compute_reservations
from tpufleet_testbed.gke import validation
from tpufleet_testbed.gke.node_pools import NodeBackend
from tpufleet_testbed.kubernetes import kwok_nodes

EFFECTS = {
    "NO_SCHEDULE": "NoSchedule",
    "PREFER_NO_SCHEDULE": "PreferNoSchedule",
    "NO_EXECUTE": "NoExecute",
}
SPOT = "cloud.google.com/gke-spot"
PROVISIONING = "cloud.google.com/gke-provisioning"
FLEX_START = "cloud.google.com/gke-flex-start"
# Of queued provisioning: the guide to consumption options of
# https://github.com/GoogleCloudPlatform/cluster-toolkit.
QUEUED_TAINT = {"key": "cloud.google.com/gke-queued", "value": "true", "effect": "NoSchedule"}


class KwokNodes(NodeBackend):
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def create_nodes(self, pool: Any, *, chips: bool = True) -> None:
        nodes = kwok_node_pool(pool)
        for node in kwok_nodes.node_manifests(nodes if chips else replace(nodes, chips=0)):
            with contextlib.suppress(Conflict):  # it exists
                self._connection.create(NODE, node)

    def register_chips(self, pool: Any) -> None:
        """As the device plugin does, once it runs on the node."""
        for node in kwok_nodes.node_manifests(kwok_node_pool(pool)):
            name = node["metadata"]["name"]
            if self._connection.find(NODE, name) is not None:  # not deleted meanwhile
                self._connection.patch(NODE, name, {"status": node["status"]}, status=True)

    def drain_nodes(self, pool: str) -> None:
        """No new pods, and the present ones are deleted."""
        names = self._names(pool)
        for name in names:
            self._connection.patch(NODE, name, {"spec": {"unschedulable": True}})
        self._delete_pods(names, keep=("Succeeded", "Failed"))

    def delete_nodes(self, pool: str) -> None:
        """Delete the nodes, and their pods with them, as when the VMs are deleted."""
        names = self._names(pool)
        for name in names:
            self._connection.delete(NODE, name)
        self._delete_pods(names)

    def _names(self, pool: str) -> list[str]:
        nodes, _ = self._connection.list(NODE, labels={kwok_nodes.POOL: pool})
        return [node["metadata"]["name"] for node in nodes]

    def _delete_pods(self, nodes: Sequence[str], keep: Sequence[str] = ()) -> None:
        for name in nodes:
            bound, _ = self._connection.list(POD, fields={"spec.nodeName": name})
            for pod in bound:
                if (pod.get("status") or {}).get("phase") not in keep:
                    metadata = pod["metadata"]
                    self._connection.delete(POD, metadata["name"], metadata["namespace"])

    def relabel_nodes(self, pool: Any) -> None:
        for node in kwok_nodes.node_manifests(kwok_node_pool(pool)):
            name, labels = node["metadata"]["name"], node["metadata"]["labels"]
            existing = self._connection.find(NODE, name)
            if existing is None:
                continue  # deleted meanwhile
            removed = {key: None for key in existing["metadata"]["labels"] if key not in labels}
            self._connection.patch(NODE, name, {"metadata": {"labels": {**removed, **labels}}})


def kwok_node_pool(pool: Any) -> kwok_nodes.KwokNodePool:
    config = pool.config
    accelerator, chips = validation.machine_types()[config.machine_type]
    labels = dict(config.labels)
    labels[PROVISIONING] = "standard"
    if config.spot or config.flex_start:
        labels[PROVISIONING] = "spot" if config.spot else "flex-start"
    if config.spot:
        labels[SPOT] = "true"
    if config.flex_start:
        labels[FLEX_START] = "true"
    if config.reservation_affinity.values:
        labels |= compute_reservations.parse(config.reservation_affinity.values[0]).node_labels
    return kwok_nodes.KwokNodePool(
        name=pool.name,
        nodes=validation.node_count(pool),
        accelerator=accelerator,
        topology=validation.topology_of(pool),
        machine_type=config.machine_type,
        chips=chips,
        zone=pool.locations[0] if pool.locations else "us-central1-a",
        labels=labels,
        taints=[
            {"key": taint.key, "value": taint.value, "effect": EFFECTS[taint.effect.name]}
            for taint in config.taints
        ]
        + ([QUEUED_TAINT] if pool.queued_provisioning.enabled else []),
    )
