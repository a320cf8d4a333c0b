"""Watch caches of pods, their owners and managed nodes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from tpufleet.errors import Conflict, NotFound
from tpufleet.kubernetes import probes
from tpufleet.kubernetes.connections import (
    JOB,
    JOBSET,
    LEADER_WORKER_SET,
    NODE,
    POD,
    Connection,
    Json,
    ResourceKind,
)
from tpufleet.kubernetes.watch_cache import WatchCache
from tpufleet_gke.provisioner.model import label_keys, pod_owners
from tpufleet_gke.provisioner.model.pod_owners import OwnerStatus

CORDON_ATTEMPTS = 5
SLICE = ResourceKind("accelerator.gke.io", "v1beta1", "Slice", "slices", namespaced=False)
CONFIG_MAP = ResourceKind("", "v1", "ConfigMap", "configmaps")
MISFITS = "misfits"
MAX_MISFITS = 500  # an object has at most a mebibyte
KUBERNETES_KINDS = {
    pod_owners.JOBSET: JOBSET,
    pod_owners.JOB: JOB,
    pod_owners.LEADER_WORKER_SET: LEADER_WORKER_SET,
    pod_owners.POD: POD,
}


class WatchedCluster:
    """Watches only pods with the labels of the served kinds, and only leaders where a label tells
    them apart. Single pods have no common label: serving them means watching every pod."""

    def __init__(
        self,
        connection: Connection,
        on_change: Callable[[], None],
        served_kinds: Collection[str] = (pod_owners.JOBSET,),
        namespace: str = label_keys.NAMESPACE,
        dynamic_slices: bool = False,
    ) -> None:
        self._connection, self._namespace = connection, namespace
        from lightkube.operators import exists, not_in

        managed = {label_keys.MANAGER: label_keys.MANAGER_NAME}
        self._nodes = WatchCache(connection, NODE, on_change, labels=managed)
        self._pods = [
            WatchCache(connection, POD, on_change, labels=labels)
            for labels in _label_selectors(served_kinds)
        ]
        if pod_owners.JOBSET in served_kinds and not {pod_owners.JOB, pod_owners.POD} & {
            *served_kinds
        }:
            # Other pods of a Job, while they are pending.
            others = {
                label_keys.JOBSET_NAME: exists(),
                label_keys.COMPLETION_INDEX: not_in(["0"]),
            }
            fields = {"status.phase": "Pending"}
            self._pods.append(WatchCache(connection, POD, on_change, labels=others, fields=fields))
        self._owners = {
            kind: WatchCache(connection, KUBERNETES_KINDS[kind], on_change)
            for kind in served_kinds
            if kind != pod_owners.POD
        }
        if pod_owners.POD in served_kinds:
            self._owners[pod_owners.POD] = self._pods[0]
        # Those of JobSets: a pool is released with its Job.
        self._jobs = (
            self._owners[pod_owners.JOB]
            if pod_owners.JOB in served_kinds
            else WatchCache(connection, JOB, on_change, labels={label_keys.JOBSET_NAME: exists()})
        )
        self._slices = WatchCache(connection, SLICE, on_change)
        partitioned = {label_keys.PARTITION: exists()}
        self._partition_nodes = WatchCache(connection, NODE, on_change, labels=partitioned)
        self._caches = (
            *((self._slices, self._partition_nodes) if dynamic_slices else ()),
            self._nodes, *self._pods, *(() if pod_owners.JOB in served_kinds else (self._jobs,)),
            *(cache for kind, cache in self._owners.items() if kind != pod_owners.POD),
        )  # fmt: skip

    def start(self) -> None:
        for cache in self._caches:
            cache.start()

    def wait_synced(self, timeout: float) -> bool:
        return all(cache.synced.wait(timeout) for cache in self._caches)

    @property
    def synced(self) -> bool:
        return all(cache.synced.is_set() for cache in self._caches)

    @property
    def caches(self) -> Sequence[WatchCache]:
        return self._caches

    def stale(self) -> str | None:
        """Why `pods`, `nodes` and `owners` are too old to act on; None while they are current."""
        return probes.stale_caches(self._caches)

    def close(self) -> None:
        for cache in self._caches:
            cache.close()

    def pods(self) -> Sequence[Json]:
        pods = (pod for cache in self._pods for pod in cache.all())
        return list({pod["metadata"]["uid"]: pod for pod in pods}.values())

    def nodes(self) -> Sequence[Json]:
        return self._nodes.all()

    def tpu_slices(self) -> Sequence[Json]:
        return self._slices.all()

    def partition_nodes(self) -> Sequence[Json]:
        return self._partition_nodes.all()

    def create_slice(self, manifest: Mapping[str, Any]) -> None:
        with contextlib.suppress(Conflict):  # created before, and not listed yet
            self._connection.create(SLICE, dict(manifest))

    def delete_slice(self, name: str) -> None:
        with contextlib.suppress(NotFound):
            self._connection.delete(SLICE, name)

    def owners(self) -> Mapping[tuple[str, str], OwnerStatus]:
        statuses: dict[tuple[str, str], OwnerStatus] = {}
        for kind, cache in self._owners.items():
            statuses |= pod_owners.owner_statuses(kind, cache.all())
        return statuses

    def completed_jobs(self) -> Mapping[tuple[str, str], datetime]:
        return pod_owners.completed_jobs(self._jobs.all())

    def pods_on(self, node: str) -> Sequence[Json]:
        """All pods bound to this node, from the API server."""
        pods, _ = self._connection.list(POD, fields={"spec.nodeName": node})
        return pods

    def set_cordon(self, node: str, at: datetime | None) -> None:
        """Cordon a node, or lift the cordon (None). Nothing happens if the node is gone."""
        # First as it was watched: half the calls, where pools have hundreds of nodes. Then as it
        # is, which controllers of Kubernetes may change before we do.
        found = self._nodes.get(node)
        with contextlib.suppress(NotFound):
            for _ in range(CORDON_ATTEMPTS - 1):
                with contextlib.suppress(Conflict):
                    return self._change_cordon(found or self._connection.get(NODE, node), at)
                found = None
            self._change_cordon(self._connection.get(NODE, node), at)

    def _change_cordon(self, node: Json, at: datetime | None) -> None:
        """Conflict if the node has changed: someone else may have cordoned it."""
        change = cordon_change(node, at)
        change["metadata"]["resourceVersion"] = node["metadata"]["resourceVersion"]
        self._connection.patch(NODE, str(node["metadata"]["name"]), change)

    def load_misfits(self) -> dict[str, Any]:
        found = self._connection.find(CONFIG_MAP, MISFITS, self._namespace)
        text = ((found or {}).get("data") or {}).get(MISFITS, "{}")
        return dict(json.loads(text))

    def save_misfits(self, misfits: Mapping[str, Any]) -> None:
        latest = dict(list(misfits.items())[-MAX_MISFITS:])
        metadata = {"name": MISFITS, "namespace": self._namespace}
        data = {MISFITS: json.dumps(latest)}
        self._connection.apply(CONFIG_MAP, {"metadata": metadata, "data": data})

    def fetch_owner(self, namespace: str, name: str) -> OwnerStatus | None:
        """From the API server, because a watch cache may be stale."""
        kind, object_name = pod_owners.split_owner_name(name)
        resource = self._connection.find(KUBERNETES_KINDS[kind], object_name, namespace)
        if resource is None:
            return None
        return pod_owners.owner_statuses(kind, [resource]).get((namespace, name))


def cordon_change(node: Json, at: datetime | None) -> Json:
    """A merge patch. A cordon of someone else stays when that of the provisioner is lifted."""
    marks = node["metadata"].get("annotations") or {}
    ours = label_keys.CORDONED_AT in marks
    foreign = label_keys.CORDONED_BEFORE in marks
    if not ours:
        foreign = bool((node.get("spec") or {}).get("unschedulable"))
    if at is None:
        annotations: dict[str, str | None] = dict.fromkeys(
            (label_keys.CORDONED_AT, label_keys.CORDONED_BEFORE)
        )
        unschedulable = True if foreign else None
    else:
        before = "true" if foreign else None
        annotations = {
            label_keys.CORDONED_AT: at.isoformat(),
            label_keys.CORDONED_BEFORE: before,
        }
        unschedulable = True
    return {"metadata": {"annotations": annotations}, "spec": {"unschedulable": unschedulable}}


def _label_selectors(served_kinds: Collection[str]) -> list[dict[str, object] | None]:
    """One watch for each. None selects all pods."""
    from lightkube import operators

    if pod_owners.POD in served_kinds:
        return [None]
    exists = operators.exists()
    selectors: list[dict[str, object] | None] = []
    if pod_owners.JOB in served_kinds:  # includes the Jobs of JobSets
        selectors.append({label_keys.JOB_NAME: exists})
    elif pod_owners.JOBSET in served_kinds:
        selectors.append({label_keys.JOBSET_NAME: exists, label_keys.COMPLETION_INDEX: "0"})
    if pod_owners.LEADER_WORKER_SET in served_kinds:
        selectors.append(
            {label_keys.LWS_NAME: exists, label_keys.LWS_WORKER: operators.in_(["0", "1"])}
        )
        selectors.append({label_keys.LWS_NAME: exists, label_keys.LWS_SUBGROUP: exists})
    return selectors
