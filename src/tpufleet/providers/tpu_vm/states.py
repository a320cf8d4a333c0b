"""What every state of a node and of a queued resource means to us."""

from __future__ import annotations

from datetime import datetime, timedelta

from google.cloud import tpu_v2

from tpufleet.errors import NoCapacity, QuotaExceeded
from tpufleet.model.cloud_slices import CloudState
from tpufleet.model.hosts import NoticeKind
from tpufleet.providers.tpu_vm import error_mapping

State = tpu_v2.Node.State
Health = tpu_v2.Node.Health
QueuedState = tpu_v2.QueuedResourceState.State
# Health comes and goes for a moment, at boot above all; agents report real deaths sooner.
UNHEALTHY_FOR = timedelta(minutes=2)

# Where the machines come up again by themselves, the agents tell when they are back.
NODE_STATES: dict[State, tuple[CloudState, str]] = {
    State.STATE_UNSPECIFIED: (CloudState.CREATING, "the API gave a state that is unknown here"),
    State.CREATING: (CloudState.CREATING, "the machines are being created"),
    State.READY: (CloudState.UP, ""),
    State.RESTARTING: (CloudState.CREATING, "the machines restart"),
    State.REIMAGING: (CloudState.CREATING, "the machines get a new image"),
    State.DELETING: (CloudState.STOPPING, "the node is being deleted"),
    State.REPAIRING: (CloudState.CREATING, "the provider repairs the node"),
    State.STOPPED: (CloudState.FAILED, "somebody stopped the node"),
    State.STOPPING: (CloudState.STOPPING, "somebody stops the node"),
    State.STARTING: (CloudState.CREATING, "the node starts again"),
    State.PREEMPTED: (CloudState.PREEMPTED, "preempted"),
    State.TERMINATED: (
        CloudState.PREEMPTED,
        "terminated, for maintenance or at the end of a preemptible node's life",
    ),
    State.HIDING: (CloudState.STOPPING, "the provider hides the node"),
    State.HIDDEN: (CloudState.FAILED, "the provider has hidden the node"),
    State.UNHIDING: (CloudState.CREATING, "the provider brings the node back"),
    State.UNKNOWN: (CloudState.FAILED, "a repair of the node failed"),
}

# ACTIVE is missing: then the nodes themselves tell.
QUEUED_STATES: dict[QueuedState, tuple[CloudState, str]] = {
    QueuedState.STATE_UNSPECIFIED: (
        CloudState.PENDING,
        "the API gave a state that is unknown here",
    ),
    QueuedState.CREATING: (CloudState.PENDING, "the request is being looked at"),
    QueuedState.ACCEPTED: (CloudState.PENDING, "the request is in the provider's queue"),
    QueuedState.WAITING_FOR_RESOURCES: (CloudState.PENDING, "the request waits for capacity"),
    QueuedState.PROVISIONING: (CloudState.CREATING, "the machines are being created"),
    QueuedState.FAILED: (CloudState.FAILED, "the queued request failed"),
    QueuedState.DELETING: (CloudState.STOPPING, "the queued request is being deleted"),
    QueuedState.SUSPENDING: (CloudState.PREEMPTED, "the provider takes the machines back"),
    QueuedState.SUSPENDED: (CloudState.PREEMPTED, "the provider took the machines back"),
}
WAITING = (QueuedState.CREATING, QueuedState.ACCEPTED, QueuedState.WAITING_FOR_RESOURCES)
UNHEALTHY = (Health.TIMEOUT, Health.UNHEALTHY_TENSORFLOW)


def node_state(
    node: tpu_v2.Node, unhealthy_since: datetime | None, now: datetime
) -> tuple[CloudState, str, tuple[int, ...], NoticeKind | None]:
    """State, words, hosts known to be dead, and notice."""
    state, words = NODE_STATES.get(node.state, NODE_STATES[State.STATE_UNSPECIFIED])
    notice = NoticeKind.MAINTENANCE if node.health is Health.UNHEALTHY_MAINTENANCE else None
    if state is not CloudState.UP:
        return state, words, (), notice
    if node.health not in UNHEALTHY:
        return state, node.health_description if notice else "", (), notice
    said = node.health_description or f"its health is {Health(node.health).name}"
    lost = _lost_hosts(node)
    if lost:
        return state, said, lost, None
    if unhealthy_since is not None and now - unhealthy_since >= UNHEALTHY_FOR:
        minutes = (now - unhealthy_since) // timedelta(minutes=1)
        return CloudState.FAILED, f"unhealthy for {minutes} min: {said}", (), None
    return state, said, (), None


def queued_state(
    queued: tpu_v2.QueuedResource, timeout: timedelta, now: datetime
) -> tuple[CloudState, str]:
    """For a request that is not ACTIVE."""
    standing = queued.state.state
    state, words = QUEUED_STATES.get(standing, QUEUED_STATES[QueuedState.STATE_UNSPECIFIED])
    if standing is QueuedState.FAILED:
        return _why_failed(queued, words)
    if standing in WAITING and queued.create_time and now - queued.create_time >= timeout:
        waited = int((now - queued.create_time).total_seconds())
        return CloudState.REFUSED, f"no capacity came in {waited} s"
    return state, words


def _why_failed(queued: tpu_v2.QueuedResource, words: str) -> tuple[CloudState, str]:
    error = queued.state.failed_data.error
    if not error.code:
        return CloudState.FAILED, words
    sorted_error = error_mapping.translate_status(error.code, error.message, words)
    refused = isinstance(sorted_error, NoCapacity | QuotaExceeded)
    return CloudState.REFUSED if refused else CloudState.FAILED, str(sorted_error)


def _lost_hosts(node: tpu_v2.Node) -> tuple[int, ...]:
    """Workers that the API itself says do not answer."""
    timed_out = tpu_v2.Symptom.SymptomType.EXECUTE_TIMED_OUT
    named = {
        symptom.worker_id.rpartition("-")[2]
        for symptom in node.symptoms
        if symptom.symptom_type is timed_out
    }
    return tuple(sorted(int(worker) for worker in named if worker.isdecimal()))
