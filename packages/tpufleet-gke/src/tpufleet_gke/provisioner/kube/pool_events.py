"""Kubernetes events about node pools, on what they concern and on the JobSet (or other owner) that
people look at. The first seven reasons are those of the upstream provisioner."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from tpufleet.errors import unexpected
from tpufleet.kubernetes.connections import JOB, JOBSET, LEADER_WORKER_SET, POD, Json
from tpufleet_gke.provisioner.kube import event_recorder
from tpufleet_gke.provisioner.kube.event_recorder import KubernetesEventRecorder
from tpufleet_gke.provisioner.model import label_keys, pod_owners
from tpufleet_gke.provisioner.model.cluster_state import (
    ClusterState,
    FailureCause,
    ObservedPool,
    PodRef,
)

log = logging.getLogger("tpufleet_gke.provisioner")

CREATE_STARTED = "NodePoolCreationStarted"
CREATE_SUCCEEDED = "NodePoolCreationSucceeded"
CREATE_FAILED = "NodePoolCreationFailed"
DELETE_STARTED = "NodePoolDeletionStarted"
DELETE_SUCCEEDED = "NodePoolDeletionSucceeded"
DELETE_FAILED = "NodePoolDeletionFailed"
POOL_NOT_FOUND = "NodePoolNotFound"
POOL_REUSED = "NodePoolReused"
LEFT_TO_GKE = "NodePoolLeftToGke"
SLICE_FAILED = "SliceCreationFailed"
API_VERSIONS = {
    pod_owners.JOBSET: JOBSET.api_version,
    pod_owners.JOB: JOB.api_version,
    pod_owners.LEADER_WORKER_SET: LEADER_WORKER_SET.api_version,
    pod_owners.POD: POD.api_version,
}
MAX_DETAIL = 10_000  # characters in an annotation
_PREFIX = re.compile(r"^(node pool \S+ in [^:]+: |pod \S+ of the same JobSet: )*")
WARNINGS = {CREATE_FAILED, DELETE_FAILED, POOL_NOT_FOUND, SLICE_FAILED}


class BackgroundRecorder:
    """Writes events in its own thread, so that a slow API server does not delay reconciling."""

    def __init__(self, sink: KubernetesEventRecorder) -> None:
        self._sink = sink
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="events")

    def record(self, involved_object: Json, reason: str, message: str, **options: Any) -> None:
        def write() -> None:
            try:
                self._sink.record(involved_object, reason, message, **options)
            except Exception:
                log.exception(unexpected("writing an event"))

        self._writer.submit(write)

    def close(self, timeout: float) -> None:
        """Write queued events for at most `timeout` seconds; drop the rest."""
        wait([self._writer.submit(lambda: None)], timeout)
        self._writer.shutdown(wait=False, cancel_futures=True)


class EventReporter:
    """Reports on pods and pools. The same event on the same pod is written once, not every poll."""

    def __init__(self, sink: BackgroundRecorder) -> None:
        self._sink = sink
        self._last_reported: dict[str, tuple[str, str]] = {}  # by pod UID: reason and message

    def report_on_pod(
        self,
        pod: PodRef,
        reason: str,
        message: str,
        cause: FailureCause | None = None,
        detail: str = "",
    ) -> None:
        """`cause` is for programs that watch the events, such as tpufleet's provider `gke`;
        `detail` is Google's whole text."""
        if self._last_reported.get(pod.uid) == (reason, message):
            return
        # One cause often makes many pods wait: it is logged for the first of them.
        known = (reason, _cause_of(message)) in {
            (other, _cause_of(text)) for other, text in self._last_reported.values()
        }
        level = logging.DEBUG if known and reason == CREATE_FAILED else None
        self._last_reported[pod.uid] = (reason, message)
        reference = event_recorder.object_reference("Pod", pod.name, pod.namespace, pod.uid)
        annotations = {label_keys.FAILURE_CAUSE: cause.value} if cause is not None else {}
        self._record(reference, reason, message, annotations, detail=detail, log_level=level)
        if pod.owner_uid and pod.owner_uid != pod.uid:
            owner = _owner_reference(pod.namespace, pod.owner_name, pod.owner_uid)
            self._record(
                owner, reason, f"pod {pod.name}: {message}", detail=detail, log_level=logging.DEBUG
            )

    def report_on_pool(
        self,
        pool: ObservedPool,
        node_name: str | None,
        state: ClusterState,
        reason: str,
        message: str,
        detail: str = "",
    ) -> None:
        """A pool is not a Kubernetes object: report on one of its nodes and on its owner; if there
        is neither, on the provisioner's namespace."""
        references = []
        if node_name is not None:
            references.append(event_recorder.object_reference("Node", node_name, uid=node_name))
        status = state.owners.get(pool.owner) if pool.owner else None
        if status is not None and pool.owner is not None:
            references.append(_owner_reference(*pool.owner, status.uid))
        if not references:
            namespace = label_keys.NAMESPACE
            references.append(event_recorder.object_reference("Namespace", namespace, namespace))
        for number, reference in enumerate(references):
            # The same message again: once in the log is enough.
            level = logging.DEBUG if number else None
            self._record(reference, reason, message, detail=detail, log_level=level)

    def forget_except(self, waiting: set[str]) -> None:
        """Keep only pods that still wait, by UID."""
        self._last_reported = {
            uid: event for uid, event in self._last_reported.items() if uid in waiting
        }

    def _record(
        self,
        reference: Json,
        reason: str,
        message: str,
        annotations: Mapping[str, str] | None = None,
        detail: str = "",
        log_level: int | None = None,
    ) -> None:
        warning = reason in WARNINGS
        level = log_level or (logging.WARNING if warning else logging.INFO)
        target = "/".join(filter(None, (reference.get("namespace"), reference["name"])))
        log.log(level, "%s on %s %s: %s", reason, reference["kind"], target, message)
        if detail:
            log.log(level, "GKE's whole message: %s", detail)
            annotations = {**(annotations or {}), label_keys.GKE_MESSAGE: detail[:MAX_DETAIL]}
        self._sink.record(reference, reason, message, warning=warning, annotations=annotations)


def _cause_of(message: str) -> str:
    """Without the node pool, the zone or the pod that it begins with."""
    return _PREFIX.sub("", message)


def _owner_reference(namespace: str, owner_name: str, uid: str) -> Json:
    kind, name = pod_owners.split_owner_name(owner_name)
    return event_recorder.object_reference(
        pod_owners.KINDS[kind], name, namespace, uid, API_VERSIONS[kind]
    )
