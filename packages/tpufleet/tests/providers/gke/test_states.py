"""The state and loss reason of a slice from the conditions of its pods and JobSet."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs
from msgspec.structs import replace

from tests.providers.gke.test_manifests import SETTINGS, order
from tpufleet.model.fleet.cloud_slices import CloudState
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.pools import RefusalKind
from tpufleet.model.fleet.slices import LossReason
from tpufleet.model.job.jobs import Capacity
from tpufleet.providers.gke import (
    capacity_events,
    jobset_client,
    keys,
    manifests,
    slice_slots,
    states,
)
from tpufleet.providers.gke.states import PodLossCause

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def jobset(suspended=False, deleted=False, conditions=()):
    manifest = manifests.jobset(order("a"), SETTINGS)
    manifest["spec"]["suspend"] = suspended
    manifest["status"] = {"conditions": list(conditions)}
    if deleted:
        manifest["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return manifest


def pod(host, phase="Running", *, uid=None, since=NOW, **status):
    return {
        "metadata": {
            "uid": uid or f"uid-{host}",
            "creationTimestamp": since.isoformat(),
            "labels": {keys.JOB_INDEX: "0"},
            "annotations": {keys.COMPLETION_INDEX: str(host)},
        },
        "status": {"phase": phase, **status},
    }


def slots(**changed):
    return slice_slots.SliceSlots(
        (replace(slice_slots.initial_slots(order("a").slices).slots[0], **changed),)
    )


UIDS = tuple(f"uid-{host}" for host in range(4))
UP = [pod(host) for host in range(4)]


def observe(pods=(), table=None, manifest=None, workload=None, now=NOW, events=None):
    (found,) = states.observed_slices(
        manifest or jobset(), pods, workload, table or slots(), now, events
    )
    return found


def waiting(reason, of="containerStatuses"):
    image = {"image": "x", "state": {"waiting": {"reason": reason, "message": "no such image"}}}
    return [pod(0, "Pending", **{of: [image]})]


UNSCHEDULABLE = {
    "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes",
}  # fmt: skip
QUOTA = {"status": {"conditions": [
    {"type": "QuotaReserved", "status": "False", "message": "insufficient quota for google.com/tpu"}
]}}  # fmt: skip

COMING = [
    pytest.param([], None, "creating", "0 of 4", id="no pods yet"),
    pytest.param(UP[:3], None, "creating", "3 of 4", id="one host is missing"),
    pytest.param(UP, None, "up", "", id="all run"),
    pytest.param([pod(0, "Pending", conditions=[UNSCHEDULABLE])], None, "creating", "0/3 nodes",
                 id="unschedulable"),
    pytest.param(waiting("ImagePullBackOff"), None, "creating", "no such image", id="image"),
    pytest.param(waiting("InvalidImageName"), None, "failed", "no such image", id="bad image"),
    pytest.param(waiting("ErrImagePull", "initContainerStatuses"), None, "creating",
                 "no such image", id="image of the first container"),
    pytest.param([], QUOTA, "pending", "insufficient quota", id="quota pending"),
]  # fmt: skip


@pytest.mark.parametrize(("pods", "workload", "state", "message"), COMING)
def test_a_starting_slice_reports_what_it_waits_for(pods, workload, state, message):
    found = observe(pods, manifest=jobset(suspended=workload is not None), workload=workload)
    assert found.state == state
    assert message in found.message


def event(reason, message, *, at=0, uid="uid-0", cause=None, detail=""):
    annotations = {capacity_events.FAILURE_CAUSE: cause} if cause else {}
    annotations |= {capacity_events.GKE_MESSAGE: detail} if detail else {}
    return {
        "metadata": {"name": f"{uid}.{at}", "annotations": annotations},
        "involvedObject": {"kind": "Pod", "uid": uid},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": f"2026-01-01T00:00:{at:02}Z",
    }


STOCKOUT = event("NodePoolCreationFailed", "GCE_STOCKOUT", cause="stock")
CAPACITY_EVENTS = [
    pytest.param([], "creating", "0/3 nodes", id="none"),
    pytest.param([STOCKOUT], "refused", "GCE_STOCKOUT", id="stockout"),
    pytest.param(
        [event("NodePoolCreationFailed", "no IPs")], "refused", "no IPs", id="former provisioner"
    ),
    pytest.param(
        [event("FailedScaleUp", "GCE out of resources")],
        "refused",
        "GCE out of resources",
        id="cluster autoscaler",
    ),
    pytest.param(
        [event("NotTriggerScaleUp", "no node group")],
        "creating",
        "0/3 nodes",
        id="not the autoscaler's pool",
    ),
    pytest.param(
        [STOCKOUT, event("NodePoolCreationFailed", "503", at=9, cause="passing")],
        "creating",
        "503",
        id="retried by the provisioner",
    ),
    pytest.param(
        [event("NodePoolCreationFailed", "of another pod", uid="other", cause="stock")],
        "creating",
        "0/3 nodes",
        id="another pod",
    ),
]


# As GKE's cluster autoscaler writes them.
AUTOSCALER_REASONS = [
    "GCE quota exceeded",
    "GCE out of resources",
    "Service Account was deleted",
    "IP space exhausted",
    "Unsupported Compact Placement Config: g",
    "Invalid TPU topology: 3x3",
    "Invalid TPU configuration",
    "Invalid Reservation: r",
    "Reservation not ready: r",
    "Reservation capacity exceeded: r",
    "Reservation not found or incorrectly shared: r",
    "Reservation incompatible with node group: r",
    'Some nodes in node group ["ng1"] failed to appear in time',
    "GCE out of resources, Internal error",
]


@pytest.mark.parametrize("reason", AUTOSCALER_REASONS)
def test_every_reason_of_the_autoscaler_is_a_refusal_in_few_words(reason):
    text = (
        f"Node scale up in zones us-central1-c, us-central1-a associated with this pod failed: "
        f"{reason}. Pod is at risk of not being scheduled."
    )
    (found,) = capacity_events.latest_by_pod([event("FailedScaleUp", text)]).values()
    assert (found.refused, found.message) == (True, f"cluster autoscaler: {reason}")


@pytest.mark.parametrize(("events", "state", "message"), CAPACITY_EVENTS)
def test_a_failed_node_pool_is_a_refusal(events, state, message):
    latest = capacity_events.latest_by_pod(events)
    pods = [pod(0, "Pending", conditions=[UNSCHEDULABLE])]
    (found,) = states.observed_slices(jobset(), pods, None, slots(), NOW, latest)
    assert found.state == state and message in found.message


def test_flex_start_waits_for_capacity_without_a_timeout():
    waiting = pod(0, "Pending", conditions=[UNSCHEDULABLE])
    waiting["spec"] = {"nodeSelector": {keys.FLEX_START: "true"}}
    assert observe([waiting]).state is CloudState.PENDING


def test_a_rejected_admission_check_is_a_refusal():
    check = {"name": "provisioning", "state": "Rejected", "message": "out of stock"}
    found = observe(
        manifest=jobset(suspended=True), workload={"status": {"admissionChecks": [check]}}
    )
    assert found.state is CloudState.REFUSED and "out of stock" in found.message


def disrupted(reason):
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
    return [pod(host, "Failed", conditions=[condition]) for host in range(4)]


def ended(host, reason, code):
    state = {"terminated": {"reason": reason, "exitCode": code}}
    return pod(host, "Failed", containerStatuses=[{"state": state}])


def deleted(one):
    metadata = {**one["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
    return {**one, "metadata": metadata}


LOST = [
    pytest.param(disrupted("DeletionByTaintManager"), "preempted", "tainted", id="spot"),
    pytest.param(disrupted("DeletionByPodGC"), "preempted", "node deleted", id="node deleted"),
    pytest.param(disrupted("TerminationByKubelet"), "preempted", "shut down", id="node shut down"),
    pytest.param([pod(h, "Failed", reason="Evicted", message="disk") for h in range(4)],
                 "preempted", "evicted: disk", id="evicted"),
    pytest.param([], "preempted", "pods j1-order-1-slice-0-{0,1,2,3} deleted", id="no trace"),
    pytest.param([ended(h, "OOMKilled", 137) for h in range(4)], "failed", "out of memory",
                 id="out of memory"),
    pytest.param([ended(h, "Error", 3) for h in range(4)], "failed", "status 3", id="agents ended"),
]  # fmt: skip


@pytest.mark.parametrize(("pods", "state", "message"), LOST)
def test_a_slice_without_pods_is_lost_with_a_reason(pods, state, message):
    found = observe(pods, slots(pods=UIDS))
    assert found.state == state
    assert message in found.message


MISLEADING = ("host 1 is out of memory", "out of memory: host 1", "its agent on host 1 ended")


@pytest.mark.parametrize("message", MISLEADING)
def test_the_wording_of_a_message_decides_nothing(message):
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "x", "message": message}
    disrupted = [pod(host, "Failed", conditions=[condition]) for host in range(4)]
    evicted = [pod(host, "Failed", reason="Evicted", message=message) for host in range(4)]
    for pods in (disrupted, evicted):
        found = observe(pods, slots(pods=UIDS))
        assert (found.state, found.loss) == (CloudState.PREEMPTED, None)
        assert message in found.message
    lost = slots(pods=UIDS, loss_message=message, preempted=True)
    assert observe([], lost).loss is None


CAUSES = [
    pytest.param(disrupted("DeletionByPodGC"), PodLossCause.DISRUPTED, id="disrupted"),
    pytest.param([pod(0, "Failed", reason="Evicted")], PodLossCause.EVICTED, id="evicted"),
    pytest.param([ended(0, "OOMKilled", 137)], PodLossCause.OUT_OF_MEMORY, id="OOM"),
    pytest.param([ended(0, "Error", 137)], PodLossCause.AGENT_EXITED, id="SIGKILL, not OOM"),
    pytest.param([], PodLossCause.DELETED, id="deleted"),
    pytest.param([deleted(ended(0, "Error", 137))], PodLossCause.DELETED, id="being deleted"),
    pytest.param(
        [deleted(ended(0, "Error", 137)), ended(1, "Error", 3)],
        PodLossCause.AGENT_EXITED,
        id="an agent that exits explains why others are deleted",
    ),
    pytest.param(
        [deleted(ended(0, "OOMKilled", 137))], PodLossCause.OUT_OF_MEMORY, id="OOM, then deleted"
    ),
    pytest.param(
        [ended(0, "OOMKilled", 137), *disrupted("DeletionByPodGC")],
        PodLossCause.DISRUPTED,
        id="a disruption explains the other pods",
    ),
]


@pytest.mark.parametrize(("pods", "cause"), CAUSES)
def test_the_cause_of_a_loss_is_read_from_typed_fields(pods, cause):
    assert states.pod_loss(pods).cause is cause


def test_a_dead_host_is_reported_even_after_its_pod_was_replaced():
    replaced = [*UP[:2], pod(2, uid="another", since=NOW + timedelta(seconds=9)), UP[3]]
    for pods in (replaced, [*UP[:2], ended(2, "OOMKilled", 137), UP[3]], UP[:2] + UP[3:]):
        found = observe(pods, slots(pods=UIDS))
        assert (found.state, found.lost_hosts) == (CloudState.UP, (2,))
    assert "out of memory: host 2" in observe([*UP[:2], ended(2, "OOMKilled", 137), UP[3]],
                                           slots(pods=UIDS)).message  # fmt: skip


def test_an_oom_kill_is_the_loss_reason_also_after_the_pods_are_gone():
    one = observe([*UP[:2], ended(2, "OOMKilled", 137), UP[3]], slots(pods=UIDS))
    every = observe([ended(host, "OOMKilled", 137) for host in range(4)], slots(pods=UIDS))
    remembered = observe([], slots(pods=UIDS, loss_message=every.message, loss=every.loss))
    assert {one.loss, every.loss, remembered.loss} == {LossReason.OUT_OF_MEMORY}
    assert observe([*UP[:2], ended(2, "Error", 3), UP[3]], slots(pods=UIDS)).loss is None
    assert observe(UP, slots(pods=UIDS)).loss is None


def test_a_pod_that_ends_does_not_hide_its_replacement_of_the_same_second():
    """Kubernetes' timestamps are in seconds."""
    ending = [pod(host, "Failed", uid=f"old-{host}") for host in range(4)]
    assert observe([*UP, *ending]).state == "up" == observe([*ending, *UP]).state


def test_a_loss_that_two_servers_note_keeps_the_pods_that_both_saw():
    first = slots(pods=UIDS).slots[0].mark_lost("deleted", preempted=True, leaving=["new-0"])
    second = first.mark_lost("preempted", preempted=True, leaving=UIDS)
    assert set(second.retired_pods) == {*UIDS, "new-0"}


def test_retired_pods_are_ignored():
    slot = slots(retired_pods=UIDS)
    assert observe(UP, slot).state is CloudState.CREATING
    later = [pod(host, uid=f"later-{host}", since=NOW + timedelta(minutes=2)) for host in range(4)]
    assert observe([*UP, *later], slot).state is CloudState.UP


def test_a_workload_evicted_by_kueue_is_a_preempted_slice():
    workload = {"status": {"conditions": [
        {"type": "Evicted", "status": "True", "message": "Preempted to accommodate a workload"}
    ]}}  # fmt: skip
    found = observe([], slots(pods=UIDS), jobset(suspended=True), workload)
    assert found.state is CloudState.PREEMPTED
    assert "accommodate a workload" in found.message


def test_a_slice_is_preempted_when_its_notice_period_ends():
    slot = slots(pods=UIDS, notice=NoticeKind.PREEMPTED, preempt_at=NOW + timedelta(seconds=30))
    before = observe(UP, slot)
    assert (before.state, before.notice) == (CloudState.UP, NoticeKind.PREEMPTED)
    assert observe(UP, slot, now=NOW + timedelta(seconds=30)).state is CloudState.PREEMPTED


def test_a_failed_or_deleted_jobset_is_reported():
    failed = {"type": "Failed", "status": "True", "message": "jobset failed: exit code 2"}
    assert "exit code 2" in observe(UP, manifest=jobset(conditions=[failed])).message
    assert observe(UP, manifest=jobset(deleted=True)).state is CloudState.STOPPING


def test_slots_survive_serialization():
    slot = slots(
        pods=UIDS, retired_pods=("old",), loss_message="out of memory",
        loss=LossReason.OUT_OF_MEMORY, preempted=True, dead_hosts=(1, 2),
        notice=NoticeKind.MAINTENANCE, preempt_at=NOW,
    )  # fmt: skip
    assert slice_slots.parse_slots(slot.to_json()) == slot
    assert slice_slots.parse_slots(
        slice_slots.SliceSlots((slice_slots.SliceSlot(),)).to_json()
    ).free_indexes() == [0]


def test_a_terminating_pod_is_a_preemption_notice():
    found = observe([*UP[:2], deleted(pod(2)), UP[3]], slots(pods=UIDS))
    assert (found.state, found.lost_hosts) == (CloudState.UP, ())
    assert found.notice is NoticeKind.PREEMPTED
    assert found.message == "pod j1-order-1-slice-0-2 is being deleted"
    evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    found = observe([*UP[:3], deleted(pod(3, conditions=[evicted]))], slots(pods=UIDS))
    assert (found.notice, found.message) == (
        NoticeKind.PREEMPTED, states.DISRUPTION_MESSAGES[evicted["reason"]],
    )  # fmt: skip


def test_a_terminating_pod_of_a_starting_slice_is_not_a_notice():
    assert observe([*UP[:2], deleted(pod(2))]).notice is None


def test_a_slot_that_is_lost_repeatedly_only_keeps_current_pods():
    slot = slots().slots[0]
    for number in range(1000):
        there = [f"uid-{number}-{host}" for host in range(4)]
        slot = replace(slot, pods=tuple(there)).mark_lost(
            "preempted", preempted=True, leaving=there
        )
        slot = slot.clear().assign(order("a").slices[0])
    assert len(slot.retired_pods) == 4


CAPACITIES = list(Capacity)


@pytest.mark.parametrize("first", CAPACITIES)
@pytest.mark.parametrize("then", CAPACITIES)
def test_a_slot_is_reused_only_for_the_same_capacity_type(first, then):
    """The node selectors of a JobSet never change."""
    settings = structs.replace(SETTINGS, reservations={"v5litepod-16": "ours"})
    manifest = manifests.jobset(replace(order("a"), job_id="j", capacity=first), settings)
    following = replace(order("b"), job_id="j", capacity=then)
    assert jobset_client.fits_order(manifest, following) is (first is then)


@pytest.mark.parametrize(
    "begins",
    [
        "",
        "us-central1-a (spot): ",
        "node pool train-1f2e3: GKE: ",
        "node pool train-1f2e3 in us-central1-a (on-demand): ",
        "us-central1-a (spot): GKE: ",
    ],
)
def test_a_refusal_does_not_repeat_where_it_was(begins):
    event = {
        "metadata": {}, "reason": "NodePoolCreationFailed", "involvedObject": {"uid": "u"},
        "message": f"{begins}GCE_STOCKOUT: The zone 'z' (a): no room",
    }  # fmt: skip
    found = capacity_events.latest_by_pod([event])["u"]
    assert found.message == "GCE_STOCKOUT: The zone 'z' (a): no room" and found.refused


KINDS = {
    "stock": RefusalKind.CAPACITY,
    "quota": RefusalKind.QUOTA,
    "permission": RefusalKind.ACCESS,
    "misfit": RefusalKind.CAPACITY,
    "request": RefusalKind.CAPACITY,  # perhaps a setting of the provisioner: no job fails for it
    None: RefusalKind.CAPACITY,  # the former provisioner
}


@pytest.mark.parametrize(("cause", "kind"), KINDS.items())
def test_a_refusal_has_the_kind_that_the_provisioner_names(cause, kind):
    refused = event("NodePoolCreationFailed", "no", cause=cause, detail="the whole text")
    found = capacity_events.latest_by_pod([refused])["uid-0"]
    assert (found.kind, found.detail) == (kind, "the whole text")


def in_queue(workload):
    manifest = jobset(suspended=True)
    manifest["metadata"]["labels"][keys.QUEUE] = "tpu-training-jobs"
    return observe(manifest=manifest, workload=workload)


CHECK = {"name": "flex-start", "state": "Pending", "message": "Provisioning Request waits"}
RESERVED = {"type": "QuotaReserved", "status": "False", "message": "insufficient unused quota"}
WAITS = {
    "no workload": (None, "Kueue has not queued it yet in LocalQueue training/tpu-training-jobs"),
    "no quota": ({"status": {"conditions": [RESERVED]}}, "Kueue: insufficient unused quota"),
    "not considered": (
        {"status": {}},
        "Kueue has queued it in LocalQueue training/tpu-training-jobs, and not considered it yet",
    ),
    "a check": (
        {"status": {"admissionChecks": [CHECK]}},
        "Kueue: quota is reserved, admission check flex-start: Provisioning Request waits",
    ),
}


@pytest.mark.parametrize(("workload", "message"), WAITS.values(), ids=WAITS)
def test_a_waiting_job_says_what_kueue_waits_for(workload, message):
    found = in_queue(workload)
    assert found.state is CloudState.PENDING and found.message.startswith(message)


def waiting(name, age, priority=0, uid="", queue="q"):
    return {
        "metadata": {
            "name": name, "namespace": "lab", "ownerReferences": [{"uid": uid}],
            "creationTimestamp": f"2026-01-01T00:00:{59 - age}Z",
        },
        "spec": {"queueName": queue, "priority": priority},
        "status": {"conditions": [RESERVED]},
    }  # fmt: skip


def test_a_waiting_job_says_what_is_before_it_in_its_queue():
    admitted = waiting("admitted", 49)
    admitted["status"] = {"conditions": [{"type": "QuotaReserved", "status": "True"}]}
    others = [waiting(f"w{age}", age) for age in (3, 4, 5)]
    last = waiting("last", 1, priority=-5)
    urgent = waiting("urgent", 2, priority=9, uid="u")
    queued = [admitted, *others, last, urgent, waiting("elsewhere", 9, queue="other")]
    messages = {
        workload["metadata"]["name"]: states.queue_message(workload, jobset())
        for workload in states.explained(queued, {"u": "j-urgent"})
    }
    assert messages["urgent"] == "Kueue: insufficient unused quota"
    assert messages["w5"].endswith("quota; 1 before it in LocalQueue lab/q: job j-urgent")
    assert messages["last"].endswith(
        "; 4 before it in LocalQueue lab/q: job j-urgent, Workload w5, Workload w4, …"
    )


def test_one_deleted_pod_is_named():
    found = observe([pod(0), pod(1), pod(3)], slots(pods=UIDS))
    assert (found.state, found.lost_hosts) == (CloudState.UP, (2,))
    assert found.message == "host 2: pod j1-order-1-slice-0-2 deleted"


def test_a_pod_is_named_although_its_agent_exited_because_of_the_deletion():
    found = observe([pod(0), pod(1), deleted(ended(2, "Error", 137)), pod(3)], slots(pods=UIDS))
    assert found.message == "host 2: pod j1-order-1-slice-0-2 deleted"


def test_a_jobset_that_is_being_deleted_is_named():
    assert observe(manifest=jobset(deleted=True)).message == "JobSet j1-order-1 is being deleted"


def test_a_compute_class_goes_on_to_its_next_priority_when_one_is_out_of_stock():
    waiting = pod(0, "Pending", conditions=[UNSCHEDULABLE])
    waiting["spec"] = {"nodeSelector": {keys.COMPUTE_CLASS: "ml-v5e"}}
    events = capacity_events.latest_by_pod([event("FailedScaleUp", "GCE out of resources")])
    found = observe([waiting], events=events)
    assert (found.state, found.message) == ("creating", "GCE out of resources")


def test_a_slice_that_gke_cannot_form_is_told_and_not_given_up_at_once():
    waiting = pod(0, "Pending", conditions=[UNSCHEDULABLE])
    problem = "Slice train-1: SliceCreationFailed: nodes are missing; it is formed of others"
    events = [event("SliceCreationFailed", problem, cause="passing")]
    found = observe([waiting], events=capacity_events.latest_by_pod(events))
    assert (found.state, found.message) == ("creating", problem)
