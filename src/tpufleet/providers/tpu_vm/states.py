"""What every state of a node and of a queued resource means to us."""

from __future__ import annotations

from datetime import datetime, timedelta

from google.cloud import tpu_v2

from tpufleet.errors import NoCapacity, QuotaExceeded
from tpufleet.model.clouds import CloudState
from tpufleet.model.hosts import NoticeKind
from tpufleet.providers.tpu_vm import failures

State = tpu_v2.Node.State
Health = tpu_v2.Node.Health
Standing = tpu_v2.QueuedResourceState.State
# Health comes and goes for a moment, at boot above all; agents report real deaths sooner.
UNHEALTHY_FOR = timedelta(minutes=2)

# Where the machines come up again by themselves, the agents tell when they are back.
NODES: dict[State, tuple[CloudState, str]] = {
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
QUEUED: dict[Standing, tuple[CloudState, str]] = {
    Standing.STATE_UNSPECIFIED: (CloudState.PENDING, "the API gave a state that is unknown here"),
    Standing.CREATING: (CloudState.PENDING, "the request is being looked at"),
    Standing.ACCEPTED: (CloudState.PENDING, "the request is in the provider's queue"),
    Standing.WAITING_FOR_RESOURCES: (CloudState.PENDING, "the request waits for capacity"),
    Standing.PROVISIONING: (CloudState.CREATING, "the machines are being created"),
    Standing.FAILED: (CloudState.FAILED, "the queued request failed"),
    Standing.DELETING: (CloudState.STOPPING, "the queued request is being deleted"),
    Standing.SUSPENDING: (CloudState.PREEMPTED, "the provider takes the machines back"),
    Standing.SUSPENDED: (CloudState.PREEMPTED, "the provider took the machines back"),
}
WAITING = (Standing.CREATING, Standing.ACCEPTED, Standing.WAITING_FOR_RESOURCES)
UNWELL = (Health.TIMEOUT, Health.UNHEALTHY_TENSORFLOW)


def of_node(
    node: tpu_v2.Node, unwell_since: datetime | None, now: datetime
) -> tuple[CloudState, str, tuple[int, ...], NoticeKind | None]:
    """State, words, hosts known to be dead, and notice."""
    state, words = NODES.get(node.state, NODES[State.STATE_UNSPECIFIED])
    notice = NoticeKind.MAINTENANCE if node.health is Health.UNHEALTHY_MAINTENANCE else None
    if state is not CloudState.UP:
        return state, words, (), notice
    if node.health not in UNWELL:
        return state, node.health_description if notice else "", (), notice
    said = node.health_description or f"its health is {Health(node.health).name}"
    lost = _lost_hosts(node)
    if lost:
        return state, said, lost, None
    if unwell_since is not None and now - unwell_since >= UNHEALTHY_FOR:
        minutes = (now - unwell_since) // timedelta(minutes=1)
        return CloudState.FAILED, f"unhealthy for {minutes} min: {said}", (), None
    return state, said, (), None


def of_queued(
    queued: tpu_v2.QueuedResource, patience: timedelta, now: datetime
) -> tuple[CloudState, str]:
    """For a request that is not ACTIVE."""
    standing = queued.state.state
    state, words = QUEUED.get(standing, QUEUED[Standing.STATE_UNSPECIFIED])
    if standing is Standing.FAILED:
        return _why_failed(queued, words)
    if standing in WAITING and queued.create_time and now - queued.create_time >= patience:
        waited = int((now - queued.create_time).total_seconds())
        return CloudState.REFUSED, f"no capacity came in {waited} s"
    return state, words


def _why_failed(queued: tpu_v2.QueuedResource, words: str) -> tuple[CloudState, str]:
    error = queued.state.failed_data.error
    if not error.code:
        return CloudState.FAILED, words
    sorted_error = failures.of_status(error.code, error.message, words)
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
