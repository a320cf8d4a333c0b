"""The Kubernetes side of the provisioner: live mirrors of pods, of what they belong to, and of our
nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from tpufleet.kubernetes.connections import (
    JOB,
    JOBSET,
    LEADER_WORKER_SET,
    NODE,
    POD,
    Connection,
    Json,
)
from tpufleet.kubernetes.watch_cache import WatchCache
from tpufleet.provisioner.kube import label_keys, pod_owners
from tpufleet.provisioner.kube.pod_owners import OwnerStatus

KUBERNETES_KINDS = {
    pod_owners.JOBSET: JOBSET,
    pod_owners.JOB: JOB,
    pod_owners.LEADER_WORKER_SET: LEADER_WORKER_SET,
    pod_owners.POD: POD,
}


class WatchedCluster:
    """Pods are watched by the labels of what is served, and as leaders alone where a label tells: a
    pool is made for each of those. Single pods have no label in common, so to serve them all pods
    of the cluster are watched."""

    def __init__(
        self,
        connection: Connection,
        changed: Callable[[], None],
        served: Collection[str] = (pod_owners.JOBSET,),
    ) -> None:
        self._connection = connection
        ours = {label_keys.MANAGER: label_keys.MANAGER_NAME}
        self._nodes = WatchCache(connection, NODE, changed, labels=ours)
        self._pods = [
            WatchCache(connection, POD, changed, labels=labels) for labels in _labels(served)
        ]
        self._owners = {
            kind: WatchCache(connection, KUBERNETES_KINDS[kind], changed)
            for kind in served
            if kind != pod_owners.POD
        }
        if pod_owners.POD in served:
            self._owners[pod_owners.POD] = self._pods[0]
        self._mirrors = (
            self._nodes, *self._pods,
            *(mirror for kind, mirror in self._owners.items() if kind != pod_owners.POD),
        )  # fmt: skip

    def start(self) -> None:
        for mirror in self._mirrors:
            mirror.start()

    def wait_synced(self, timeout: float) -> bool:
        return all(mirror.synced.wait(timeout) for mirror in self._mirrors)

    @property
    def synced(self) -> bool:
        return all(mirror.synced.is_set() for mirror in self._mirrors)

    def close(self) -> None:
        for mirror in self._mirrors:
            mirror.close()

    def pods(self) -> Sequence[Json]:
        found = (pod for mirror in self._pods for pod in mirror.all())
        return list({pod["metadata"]["uid"]: pod for pod in found}.values())

    def nodes(self) -> Sequence[Json]:
        return self._nodes.all()

    def owners(self) -> Mapping[tuple[str, str], OwnerStatus]:
        known: dict[tuple[str, str], OwnerStatus] = {}
        for kind, mirror in self._owners.items():
            known |= pod_owners.owner_statuses(kind, mirror.all())
        return known

    def fetch_owner(self, namespace: str, name: str) -> OwnerStatus | None:
        """Asked of the server itself: what was watched may be stale."""
        kind, plain = pod_owners.split_owner_name(name)
        found = self._connection.find(KUBERNETES_KINDS[kind], plain, namespace)
        return pod_owners.owner_statuses(kind, [found]).get((namespace, name)) if found else None


def _labels(served: Collection[str]) -> list[dict[str, object] | None]:
    from lightkube import operators

    if pod_owners.POD in served:
        return [None]
    there = operators.exists()
    chosen: list[dict[str, object] | None] = []
    if pod_owners.JOB in served:  # those of JobSets among them
        chosen.append({label_keys.JOB_NAME: there})
    elif pod_owners.JOBSET in served:
        chosen.append({label_keys.JOBSET_NAME: there, label_keys.COMPLETION_INDEX: "0"})
    if pod_owners.LEADER_WORKER_SET in served:
        chosen.append(
            {label_keys.LWS_NAME: there, label_keys.LWS_WORKER: operators.in_(["0", "1"])}
        )
        chosen.append({label_keys.LWS_NAME: there, label_keys.LWS_SUBGROUP: there})
    return chosen
