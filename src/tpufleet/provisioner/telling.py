"""The seven events of old, each on the object where somebody will look for it."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol

from tpufleet.kubernetes import recording
from tpufleet.kubernetes.connections import JOB, JOBSET, LEADER_WORKER_SET, POD, Json
from tpufleet.provisioner import families, keys
from tpufleet.provisioner.seen import PodRef, Pool, World

log = logging.getLogger("tpufleet.provisioner")

CREATION_STARTED = "NodePoolCreationStarted"
CREATION_SUCCEEDED = "NodePoolCreationSucceeded"
CREATION_FAILED = "NodePoolCreationFailed"
DELETION_STARTED = "NodePoolDeletionStarted"
DELETION_SUCCEEDED = "NodePoolDeletionSucceeded"
DELETION_FAILED = "NodePoolDeletionFailed"
NOT_FOUND = "NodePoolNotFound"
API_VERSIONS = {
    families.JOBSET: JOBSET.api_version,
    families.JOB: JOB.api_version,
    families.LEADER_WORKER_SET: LEADER_WORKER_SET.api_version,
    families.POD: POD.api_version,
}
WARNINGS = {CREATION_FAILED, DELETION_FAILED, NOT_FOUND}


class Records(Protocol):
    def record(self, about: Json, reason: str, words: str, *, warning: bool = False) -> None: ...


class Later:
    """Records that a thread of its own writes: a slow API server holds up no round."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="events")

    def record(self, about: Json, reason: str, words: str, *, warning: bool = False) -> None:
        self._writer.submit(self._write, about, reason, words, warning)

    def close(self, within: float) -> None:
        """Write what is waiting, as far as that takes no longer than so many seconds."""
        wait([self._writer.submit(lambda: None)], within)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _write(self, about: Json, reason: str, words: str, warning: bool) -> None:
        try:
            self._records.record(about, reason, words, warning=warning)
        except Exception:
            log.exception("event %s on %s was not written", reason, about["name"])


class Teller:
    """Says each thing once: a pod that waits for an hour is not told so every two seconds."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._said: dict[str, str] = {}

    def on_pod(self, pod: PodRef, reason: str, words: str) -> None:
        if self._said.get(pod.uid) == f"{reason} {words}":
            return
        self._said[pod.uid] = f"{reason} {words}"
        self._record(
            recording.reference("Pod", pod.name, pod.namespace, pod.uid), reason, words
        )

    def on_pool(self, pool: Pool, node: str | None, world: World, reason: str, words: str) -> None:
        """Pools are no Kubernetes objects: on a node of it, else its JobSet, else our namespace."""
        owner = world.owners.get(pool.owner) if pool.owner else None
        if node is not None:
            about = recording.reference("Node", node, uid=node)
        elif owner is not None and pool.owner is not None:
            namespace = pool.owner[0]
            kind, name = families.split(pool.owner[1])
            api = API_VERSIONS[kind]
            about = recording.reference(families.KINDS[kind], name, namespace, owner.uid, api)
        else:
            about = recording.reference("Namespace", keys.NAMESPACE, keys.NAMESPACE)
        self._record(about, reason, words)

    def forget(self, waiting: set[str]) -> None:
        """Pods that no longer wait."""
        self._said = {uid: said for uid, said in self._said.items() if uid in waiting}

    def _record(self, about: Json, reason: str, words: str) -> None:
        level = logging.WARNING if reason in WARNINGS else logging.INFO
        where = "/".join(filter(None, (about.get("namespace"), about["name"])))
        log.log(level, "%s, on %s %s: %s", reason, about["kind"], where, words)
        self._records.record(about, reason, words, warning=reason in WARNINGS)
