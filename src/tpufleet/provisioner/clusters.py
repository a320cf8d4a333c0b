"""The Kubernetes side of the provisioner: live mirrors of pods, JobSets and our nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tpufleet.kubernetes.connections import JOBSET, NODE, POD, Connection, Json
from tpufleet.kubernetes.mirrors import Mirror
from tpufleet.provisioner import keys


class WatchedCluster:
    """Pods are watched by JobSet's label and as leaders alone: a pool is made for each of those."""

    def __init__(self, connection: Connection, changed: Callable[[], None]) -> None:
        from lightkube import operators

        self._connection = connection
        leaders = {keys.JOBSET_NAME: operators.exists(), keys.COMPLETION_INDEX: "0"}
        ours = {keys.MANAGER: keys.MANAGED_BY_US}
        self._pods = Mirror(connection, POD, changed, labels=leaders)
        self._jobsets = Mirror(connection, JOBSET, changed)
        self._nodes = Mirror(connection, NODE, changed, labels=ours)
        self._mirrors = (self._pods, self._jobsets, self._nodes)

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
        return self._pods.all()

    def jobsets(self) -> Sequence[Json]:
        return self._jobsets.all()

    def nodes(self) -> Sequence[Json]:
        return self._nodes.all()

    def jobset_now(self, namespace: str, name: str) -> Json | None:
        return self._connection.find(JOBSET, name, namespace)
