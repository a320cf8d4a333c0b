"""Maps the states of nodes and queued resources to slice states."""

from __future__ import annotations

from datetime import datetime, timedelta

from google.cloud import tpu_v2

from tpufleet.model.fleet.cloud_slices import CloudState
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.pools import RefusalKind, refusal_kind
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu.type_lookup import find, short_name
from tpufleet.providers.base import Order, no_capacity_within
from tpufleet.providers.tpu_vm import adoption, error_mapping, naming

State = tpu_v2.Node.State
Health = tpu_v2.Node.Health
QueuedState = tpu_v2.QueuedResourceState.State

# A node that comes back by itself is CREATING: its agents report when they are back.
NODE_STATES: dict[int, CloudState] = {
    State.STATE_UNSPECIFIED: CloudState.CREATING,
    State.CREATING: CloudState.CREATING,
    State.READY: CloudState.UP,
    State.RESTARTING: CloudState.CREATING,
    State.REIMAGING: CloudState.CREATING,
    State.DELETING: CloudState.STOPPING,
    State.REPAIRING: CloudState.CREATING,
    State.STOPPED: CloudState.FAILED,
    State.STOPPING: CloudState.STOPPING,
    State.STARTING: CloudState.CREATING,
    State.PREEMPTED: CloudState.PREEMPTED,
    State.TERMINATED: CloudState.PREEMPTED,
    State.HIDING: CloudState.STOPPING,
    State.HIDDEN: CloudState.FAILED,
    State.UNHIDING: CloudState.CREATING,
    State.UNKNOWN: CloudState.FAILED,  # repairing it failed
}
# Where the name of the state does not say it.
_NODE_MESSAGES: dict[int, str] = {
    State.CREATING: "creating the node",
    State.READY: "",
    State.PREEMPTED: "preempted",
    State.TERMINATED: "terminated for maintenance, or after the 24 hours of a preemptible TPU VM",
    State.UNKNOWN: "repairing the TPU VM failed",
}

# Without machines. A deletion or a stop that is in progress proves nothing yet.
FENCED_STATES = (State.PREEMPTED, State.TERMINATED, State.STOPPED, State.HIDDEN)

# In others the API refuses an update: an adopted node keeps our labels, and is left alone.
UPDATABLE_STATES = (State.READY, State.STOPPED)
_SOON_READY = (State.CREATING, State.STARTING, State.RESTARTING)

# Without ACTIVE: then the states of the nodes apply.
QUEUED_STATES: dict[int, tuple[CloudState, str]] = {
    QueuedState.STATE_UNSPECIFIED: (CloudState.PENDING, "queued"),
    QueuedState.CREATING: (CloudState.PENDING, "queued"),
    QueuedState.ACCEPTED: (CloudState.PENDING, "queued"),
    QueuedState.WAITING_FOR_RESOURCES: (CloudState.PENDING, "queued, waiting for capacity"),
    QueuedState.PROVISIONING: (CloudState.CREATING, "creating the node"),
    QueuedState.FAILED: (CloudState.FAILED, "the queued resource failed"),
    QueuedState.DELETING: (CloudState.STOPPING, "deleting"),
    QueuedState.SUSPENDING: (CloudState.PREEMPTED, "being preempted"),
    QueuedState.SUSPENDED: (CloudState.PREEMPTED, "preempted"),
}
WAITING = (QueuedState.CREATING, QueuedState.ACCEPTED, QueuedState.WAITING_FOR_RESOURCES)
UNHEALTHY = (Health.TIMEOUT, Health.UNHEALTHY_TENSORFLOW)


def node_state(
    node: tpu_v2.Node,
) -> tuple[CloudState, str, tuple[int, ...], NoticeKind | None]:
    """State, message, unresponsive hosts, and notice. Health flaps, above all at boot, and has been
    wrong about nodes that worked: a node is not given up for it. Agents report real deaths."""
    known = State(node.state if node.state in NODE_STATES else 0)
    state, name = NODE_STATES[known], known.name.lower().replace("_", " ")
    message = _NODE_MESSAGES.get(known, f"the TPU VM is {name}")
    notice = NoticeKind.MAINTENANCE if node.health is Health.UNHEALTHY_MAINTENANCE else None
    if state is not CloudState.UP:
        return state, message, (), notice
    if node.health not in UNHEALTHY:
        return state, node.health_description if notice else "", (), notice
    message = node.health_description or f"health is {Health(node.health).name}"
    return state, message, _lost_hosts(node), None


def queued_state(
    queued: tpu_v2.QueuedResource, timeout: timedelta, now: datetime
) -> tuple[CloudState, str, RefusalKind]:
    """For a queued resource that is not ACTIVE; the kind applies if it was refused."""
    queue_state = queued.state.state
    state, message = QUEUED_STATES.get(queue_state, QUEUED_STATES[QueuedState.STATE_UNSPECIFIED])
    if queue_state is QueuedState.FAILED:
        return _why_failed(queued, message)
    if queue_state in WAITING and queued.create_time and now - queued.create_time >= timeout:
        message = no_capacity_within(now - queued.create_time)
        return CloudState.REFUSED, message, RefusalKind.CAPACITY
    return state, message, RefusalKind.CAPACITY


def _why_failed(queued: tpu_v2.QueuedResource, message: str) -> tuple[CloudState, str, RefusalKind]:
    status = queued.state.failed_data.error
    if not status.code:
        return CloudState.FAILED, message, RefusalKind.CAPACITY
    error = error_mapping.translate_status(status.code, status.message, message)
    kind = refusal_kind(error)
    state = CloudState.REFUSED if kind else CloudState.FAILED
    return state, str(error), kind or RefusalKind.CAPACITY


def _lost_hosts(node: tpu_v2.Node) -> tuple[int, ...]:
    """Workers that the API reports as not responding."""
    timed_out = tpu_v2.Symptom.SymptomType.EXECUTE_TIMED_OUT
    workers = {
        symptom.worker_id.rpartition("-")[2]
        for symptom in node.symptoms
        if symptom.symptom_type is timed_out
    }
    return tuple(sorted(int(worker) for worker in workers if worker.isdecimal()))


def capacity_of(node: tpu_v2.Node) -> Capacity:
    scheduling = node.scheduling_config
    if scheduling.spot or scheduling.preemptible:
        return Capacity.SPOT
    return Capacity.RESERVED if scheduling.reserved else Capacity.ON_DEMAND


def check_adoptable(node: tpu_v2.Node | None, order: Order) -> tpu_v2.Node:
    """BadRequest if this node cannot become the slice of the order."""
    if node is None:
        raise naming.no_such_node(order.node, order.zone)
    adoption.check_owner(node.labels, order)
    if node.accelerator_type != find(order.accelerator).name:
        raise adoption.wrong_type(order, short_name(node.accelerator_type))
    state = State(node.state)
    if state is not State.READY:
        repair = "" if state in _SOON_READY else f"tpu vm repair {order.node}"
        raise adoption.not_ready(order, state.name.lower(), repair)
    return node
