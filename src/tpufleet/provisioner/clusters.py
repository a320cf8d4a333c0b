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
from tpufleet.kubernetes.mirrors import WatchCache
from tpufleet.provisioner import families, keys
from tpufleet.provisioner.families import OwnerStatus

KUBERNETES_KINDS = {
    families.JOBSET: JOBSET,
    families.JOB: JOB,
    families.LEADER_WORKER_SET: LEADER_WORKER_SET,
    families.POD: POD,
}


class WatchedCluster:
    """Pods are watched by the labels of what is served, and as leaders alone where a label tells: a
    pool is made for each of those. Single pods have no label in common, so to serve them all pods
    of the cluster are watched."""

    def __init__(
        self,
        connection: Connection,
        changed: Callable[[], None],
        served: Collection[str] = (families.JOBSET,),
    ) -> None:
        self._connection = connection
        ours = {keys.MANAGER: keys.MANAGER_NAME}
        self._nodes = WatchCache(connection, NODE, changed, labels=ours)
        self._pods = [
            WatchCache(connection, POD, changed, labels=labels) for labels in _labels(served)
        ]
        self._owners = {
            kind: WatchCache(connection, KUBERNETES_KINDS[kind], changed)
            for kind in served
            if kind != families.POD
        }
        if families.POD in served:
            self._owners[families.POD] = self._pods[0]
        self._mirrors = (
            self._nodes, *self._pods,
            *(mirror for kind, mirror in self._owners.items() if kind != families.POD),
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
            known |= families.owner_statuses(kind, mirror.all())
        return known

    def fetch_owner(self, namespace: str, name: str) -> OwnerStatus | None:
        """Asked of the server itself: what was watched may be stale."""
        kind, plain = families.split_owner_name(name)
        found = self._connection.find(KUBERNETES_KINDS[kind], plain, namespace)
        return families.owner_statuses(kind, [found]).get((namespace, name)) if found else None


def _labels(served: Collection[str]) -> list[dict[str, object] | None]:
    from lightkube import operators

    if families.POD in served:
        return [None]
    there = operators.exists()
    chosen: list[dict[str, object] | None] = []
    if families.JOB in served:  # those of JobSets among them
        chosen.append({keys.JOB_NAME: there})
    elif families.JOBSET in served:
        chosen.append({keys.JOBSET_NAME: there, keys.COMPLETION_INDEX: "0"})
    if families.LEADER_WORKER_SET in served:
        chosen.append({keys.LWS_NAME: there, keys.LWS_WORKER: operators.in_(["0", "1"])})
        chosen.append({keys.LWS_NAME: there, keys.LWS_SUBGROUP: there})
    return chosen
