"""The seven events of old, each on the object where somebody will look for it."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol

from tpufleet.kubernetes import event_recorder
from tpufleet.kubernetes.connections import JOB, JOBSET, LEADER_WORKER_SET, POD, Json
from tpufleet.provisioner.kube import label_keys, pod_owners
from tpufleet.provisioner.planning.cluster_state import ClusterState, ObservedPool, PodRef

log = logging.getLogger("tpufleet.provisioner")

CREATE_STARTED = "NodePoolCreationStarted"
CREATE_SUCCEEDED = "NodePoolCreationSucceeded"
CREATE_FAILED = "NodePoolCreationFailed"
DELETE_STARTED = "NodePoolDeletionStarted"
DELETE_SUCCEEDED = "NodePoolDeletionSucceeded"
DELETE_FAILED = "NodePoolDeletionFailed"
POOL_NOT_FOUND = "NodePoolNotFound"
API_VERSIONS = {
    pod_owners.JOBSET: JOBSET.api_version,
    pod_owners.JOB: JOB.api_version,
    pod_owners.LEADER_WORKER_SET: LEADER_WORKER_SET.api_version,
    pod_owners.POD: POD.api_version,
}
WARNINGS = {CREATE_FAILED, DELETE_FAILED, POOL_NOT_FOUND}


class EventSink(Protocol):
    def record(self, about: Json, reason: str, message: str, *, warning: bool = False) -> None: ...


class BackgroundRecorder:
    """Records that a thread of its own writes: a slow API server holds up no round."""

    def __init__(self, records: EventSink) -> None:
        self._records = records
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="events")

    def record(self, about: Json, reason: str, message: str, *, warning: bool = False) -> None:
        self._writer.submit(self._write, about, reason, message, warning)

    def close(self, within: float) -> None:
        """Write what is waiting, as far as that takes no longer than so many seconds."""
        wait([self._writer.submit(lambda: None)], within)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _write(self, about: Json, reason: str, words: str, warning: bool) -> None:
        try:
            self._records.record(about, reason, words, warning=warning)
        except Exception:
            log.exception("event %s on %s was not written", reason, about["name"])


class EventReporter:
    """Says each thing once: a pod that waits for an hour is not told so every two seconds."""

    def __init__(self, records: EventSink) -> None:
        self._records = records
        self._said: dict[str, str] = {}

    def report_on_pod(self, pod: PodRef, reason: str, message: str) -> None:
        if self._said.get(pod.uid) == f"{reason} {message}":
            return
        self._said[pod.uid] = f"{reason} {message}"
        self._record(
            event_recorder.object_reference("Pod", pod.name, pod.namespace, pod.uid),
            reason,
            message,
        )

    def report_on_pool(
        self, pool: ObservedPool, node: str | None, world: ClusterState, reason: str, message: str
    ) -> None:
        """Pools are no Kubernetes objects: on a node of it, else its JobSet, else our namespace."""
        owner = world.owners.get(pool.owner) if pool.owner else None
        if node is not None:
            about = event_recorder.object_reference("Node", node, uid=node)
        elif owner is not None and pool.owner is not None:
            namespace = pool.owner[0]
            kind, name = pod_owners.split_owner_name(pool.owner[1])
            api = API_VERSIONS[kind]
            about = event_recorder.object_reference(
                pod_owners.KINDS[kind], name, namespace, owner.uid, api
            )
        else:
            about = event_recorder.object_reference(
                "Namespace", label_keys.NAMESPACE, label_keys.NAMESPACE
            )
        self._record(about, reason, message)

    def forget_except(self, waiting: set[str]) -> None:
        """Pods that no longer wait."""
        self._said = {uid: said for uid, said in self._said.items() if uid in waiting}

    def _record(self, about: Json, reason: str, words: str) -> None:
        level = logging.WARNING if reason in WARNINGS else logging.INFO
        where = "/".join(filter(None, (about.get("namespace"), about["name"])))
        log.log(level, "%s, on %s %s: %s", reason, about["kind"], where, words)
        self._records.record(about, reason, words, warning=reason in WARNINGS)
