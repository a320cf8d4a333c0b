"""What Kubernetes says about a slice, as a state and a reason in words."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tests.providers.gke.test_manifests import SETTINGS, order
from tpufleet.model.cloud_slices import CloudState
from tpufleet.model.hosts import NoticeKind
from tpufleet.model.jobs import Capacity
from tpufleet.model.slices import LossReason
from tpufleet.providers.gke import jobset_client, keys, manifests, slice_slots, states

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def jobset(suspended=False, deleted=False, conditions=()):
    made = manifests.jobset(order("a"), SETTINGS)
    made["spec"]["suspend"] = suspended
    made["status"] = {"conditions": list(conditions)}
    if deleted:
        made["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return made


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


def seated(**changed):
    return slice_slots.SliceSlots(
        (replace(slice_slots.initial_slots(order("a").slices).slots[0], **changed),)
    )


UIDS = tuple(f"uid-{host}" for host in range(4))
UP = [pod(host) for host in range(4)]


def seen(pods=(), seat=None, made=None, workload=None, now=NOW):
    (found,) = states.observed_slices(made or jobset(), pods, workload, seat or seated(), now)
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
    pytest.param([pod(0, "Pending", conditions=[UNSCHEDULABLE])], None, "pending", "0/3 nodes",
                 id="unschedulable"),
    pytest.param(waiting("ImagePullBackOff"), None, "creating", "no such image", id="image"),
    pytest.param(waiting("InvalidImageName"), None, "failed", "no such image", id="bad image"),
    pytest.param(waiting("ErrImagePull", "initContainerStatuses"), None, "creating",
                 "no such image", id="image of the first container"),
    pytest.param([], QUOTA, "pending", "insufficient quota", id="quota pending"),
]  # fmt: skip


@pytest.mark.parametrize(("pods", "workload", "state", "words"), COMING)
def test_a_slice_on_its_way_says_what_it_waits_for(pods, workload, state, words):
    found = seen(pods, made=jobset(suspended=workload is not None), workload=workload)
    assert found.state == state
    assert words in found.message


def disrupted(reason):
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
    return [pod(host, "Failed", conditions=[condition]) for host in range(4)]


def ended(host, reason, code):
    state = {"terminated": {"reason": reason, "exitCode": code}}
    return pod(host, "Failed", containerStatuses=[{"state": state}])


LOST = [
    pytest.param(disrupted("DeletionByTaintManager"), "preempted", "taken away", id="spot"),
    pytest.param(disrupted("DeletionByPodGC"), "preempted", "node is gone", id="node gone"),
    pytest.param(disrupted("TerminationByKubelet"), "preempted", "shut down", id="node shut down"),
    pytest.param([pod(h, "Failed", reason="Evicted", message="disk") for h in range(4)],
                 "preempted", "evicted: disk", id="evicted"),
    pytest.param([], "preempted", "pods are gone", id="vanished"),
    pytest.param([ended(h, "OOMKilled", 137) for h in range(4)], "failed", "out of memory",
                 id="out of memory"),
    pytest.param([ended(h, "Error", 3) for h in range(4)], "failed", "status 3", id="agents ended"),
]  # fmt: skip


@pytest.mark.parametrize(("pods", "state", "words"), LOST)
def test_a_slice_that_lost_all_its_pods_is_gone_and_says_why(pods, state, words):
    found = seen(pods, seated(pods=UIDS))
    assert found.state == state
    assert words in found.message


def test_a_host_that_died_is_named_even_when_a_new_pod_took_its_place():
    replaced = [*UP[:2], pod(2, uid="another", since=NOW + timedelta(seconds=9)), UP[3]]
    for pods in (replaced, [*UP[:2], ended(2, "OOMKilled", 137), UP[3]], UP[:2] + UP[3:]):
        found = seen(pods, seated(pods=UIDS))
        assert (found.state, found.lost_hosts) == (CloudState.UP, (2,))
    assert "out of memory: host 2" in seen([*UP[:2], ended(2, "OOMKilled", 137), UP[3]],
                                           seated(pods=UIDS)).message  # fmt: skip


def test_a_host_that_used_too_much_memory_is_no_host_that_was_lost():
    one = seen([*UP[:2], ended(2, "OOMKilled", 137), UP[3]], seated(pods=UIDS))
    every = seen([ended(host, "OOMKilled", 137) for host in range(4)], seated(pods=UIDS))
    remembered = seen([], seated(pods=UIDS, lost=every.message))
    assert {one.loss, every.loss, remembered.loss} == {LossReason.OUT_OF_MEMORY}
    assert seen([*UP[:2], ended(2, "Error", 3), UP[3]], seated(pods=UIDS)).loss is None
    assert seen(UP, seated(pods=UIDS)).loss is None


def test_pods_that_served_an_earlier_slice_do_not_count():
    seat = seated(past=UIDS)
    assert seen(UP, seat).state is CloudState.CREATING
    later = [pod(host, uid=f"later-{host}", since=NOW + timedelta(minutes=2)) for host in range(4)]
    assert seen([*UP, *later], seat).state is CloudState.UP


def test_when_kueue_takes_the_quota_back_the_slice_is_preempted():
    workload = {"status": {"conditions": [
        {"type": "Evicted", "status": "True", "message": "Preempted to accommodate a workload"}
    ]}}  # fmt: skip
    found = seen([], seated(pods=UIDS), jobset(suspended=True), workload)
    assert found.state is CloudState.PREEMPTED
    assert "accommodate a workload" in found.message


def test_a_slice_is_taken_when_its_notice_runs_out():
    seat = seated(pods=UIDS, notice=NoticeKind.PREEMPTED, taken_at=NOW + timedelta(seconds=30))
    assert (seen(UP, seat).state, seen(UP, seat).notice) == (CloudState.UP, NoticeKind.PREEMPTED)
    assert seen(UP, seat, now=NOW + timedelta(seconds=30)).state is CloudState.PREEMPTED


def test_a_jobset_that_failed_or_goes_says_so():
    failed = {"type": "Failed", "status": "True", "message": "jobset failed: exit code 2"}
    assert "exit code 2" in seen(UP, made=jobset(conditions=[failed])).message
    assert seen(UP, made=jobset(deleted=True)).state is CloudState.STOPPING


def test_seats_survive_being_written_down():
    seat = seated(
        pods=UIDS, past=("old",), lost="words", preempted=True, dead=(1, 2),
        notice=NoticeKind.MAINTENANCE, taken_at=NOW,
    )  # fmt: skip
    assert slice_slots.parse_slots(seat.to_json()) == seat
    assert slice_slots.parse_slots(
        slice_slots.SliceSlots((slice_slots.SliceSlot(),)).to_json()
    ).free_indexes() == [0]


def test_a_pod_that_is_being_ended_works_on_through_its_grace_period_under_notice():
    leaving = pod(2)
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    found = seen([*UP[:2], leaving, UP[3]], seated(pods=UIDS))
    assert (found.state, found.lost_hosts) == (CloudState.UP, ())
    assert found.notice is NoticeKind.PREEMPTED


def test_a_slice_that_is_not_up_yet_has_no_notice_of_pods_that_come_and_go():
    leaving = pod(2)
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert seen([*UP[:2], leaving]).notice is None


def test_a_seat_that_is_lost_over_and_over_remembers_only_pods_that_are_there():
    seat = seated().slots[0]
    for number in range(1000):
        there = [f"uid-{number}-{host}" for host in range(4)]
        seat = replace(seat, pods=tuple(there)).mark_lost("taken", preempted=True, leaving=there)
        seat = seat.clear().assign(order("a").slices[0])
    assert len(seat.retired_pods) == 4


CAPACITIES = list(Capacity)


@pytest.mark.parametrize("first", CAPACITIES)
@pytest.mark.parametrize("then", CAPACITIES)
def test_a_slice_takes_the_seat_of_one_of_the_same_capacity_alone(first, then):
    """The node selectors of a JobSet stay as they are: its seats are of one kind."""
    given = replace(SETTINGS, reservations={"v5litepod-16": "ours"})
    made = manifests.jobset(replace(order("a"), job_id="j", capacity=first), given)
    following = replace(order("b"), job_id="j", capacity=then)
    assert jobset_client.fits_order(made, following) is (first is then)
