"""Every state of nodes and queued resources, through the API, and its slice state."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from google.cloud import tpu_v2

from tests.providers.tpu_vm.emulated_tpus import ZONE, order
from tpufleet.model.fleet.cloud_slices import CloudState
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.providers.tpu_vm import states
from tpufleet_testbed.cloud_tpu.api_errors import Code
from tpufleet_testbed.servers import ApiError

State, Health, Standing = states.State, states.Health, states.QueuedState

NODES = {
    "STATE_UNSPECIFIED": CloudState.CREATING,
    "CREATING": CloudState.CREATING,
    "READY": CloudState.UP,
    "RESTARTING": CloudState.CREATING,
    "REIMAGING": CloudState.CREATING,
    "DELETING": CloudState.STOPPING,
    "REPAIRING": CloudState.CREATING,
    "STOPPED": CloudState.FAILED,
    "STOPPING": CloudState.STOPPING,
    "STARTING": CloudState.CREATING,
    "PREEMPTED": CloudState.PREEMPTED,
    "TERMINATED": CloudState.PREEMPTED,
    "HIDING": CloudState.STOPPING,
    "HIDDEN": CloudState.FAILED,
    "UNHIDING": CloudState.CREATING,
    "UNKNOWN": CloudState.FAILED,
}
QUEUED = {
    "STATE_UNSPECIFIED": CloudState.PENDING,
    "CREATING": CloudState.PENDING,
    "ACCEPTED": CloudState.PENDING,
    "WAITING_FOR_RESOURCES": CloudState.PENDING,
    "PROVISIONING": CloudState.CREATING,
    "FAILED": CloudState.FAILED,
    "DELETING": CloudState.STOPPING,
    "SUSPENDING": CloudState.PREEMPTED,
    "SUSPENDED": CloudState.PREEMPTED,
}


def up(world, *names, **options):
    world.provider.request(order(*names, **options))
    world.pass_time(10)
    assert {world.listed()[name].state for name in names} == {CloudState.UP}


def test_every_state_of_the_api_is_mapped():
    assert set(NODES) == {state.name for state in State}
    assert {*QUEUED, "ACTIVE"} == {state.name for state in Standing}


@pytest.mark.parametrize("state", NODES)
def test_node_state(world, state):
    up(world, "a")
    with world.emulator.cloud.lock:
        world.node("a").state = State[state]
    seen = world.listed()["a"]
    assert seen.state is NODES[state]
    assert seen.message or seen.state is CloudState.UP


@pytest.mark.parametrize("state", QUEUED)
def test_queued_resource_state(world, state):
    world.provider.request(order("a", capacity=Capacity.QUEUED))
    with world.emulator.cloud.lock:
        world.emulator.cloud.nodes.clear()
        world.queued("a").state = Standing[state]
    seen = world.listed()["a"]
    assert seen.state is QUEUED[state] and seen.message


def test_an_active_queued_resource_has_the_state_of_its_nodes(world):
    up(world, "gang-0", "gang-1")
    assert world.queued("gang").state is Standing.ACTIVE
    with world.emulator.cloud.lock:
        world.node("gang-1").state = State.REPAIRING
    assert world.listed()["gang-0"].state is CloudState.UP
    assert world.listed()["gang-1"].state is CloudState.CREATING


def test_an_active_queued_resource_without_nodes_has_failed(world):
    up(world, "a", capacity=Capacity.QUEUED)
    with world.emulator.cloud.lock:
        world.emulator.cloud.nodes.clear()
    assert world.listed()["a"].state is CloudState.FAILED
    world.provider.release(SliceId("a"), ZONE)
    assert world.queued("a") is None


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        pytest.param(
            ApiError(Code.DEADLINE_EXCEEDED, "not provisioned before its valid until time"),
            CloudState.REFUSED, "valid until", id="not served in time",
        ),
        pytest.param(
            ApiError(Code.RESOURCE_EXHAUSTED, "There is no more capacity in the zone"),
            CloudState.REFUSED, "no more capacity", id="stock",
        ),
        pytest.param(
            ApiError(Code.RESOURCE_EXHAUSTED, "Quota limit 'X' has been exceeded. Limit: 8"),
            CloudState.REFUSED, "Quota", id="quota",
        ),
        pytest.param(
            ApiError(Code.INVALID_ARGUMENT, "the network does not exist"),
            CloudState.REFUSED, "network", id="bad request",
        ),
    ],
)  # fmt: skip
def test_a_failed_queued_resource_reports_the_reason(world, error, state, message):
    world.provider.request(order("a", capacity=Capacity.QUEUED))
    with world.emulator.cloud.lock:
        world.emulator.cloud.nodes.clear()
        world.queued("a").state, world.queued("a").error = Standing.FAILED, error
    seen = world.listed()["a"]
    assert seen.state is state and message in seen.message


@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED"])
def test_an_ended_queued_resource_is_deleted_with_its_slice(world, state):
    world.provider.request(order("a", capacity=Capacity.QUEUED))
    with world.emulator.cloud.lock:
        world.emulator.cloud.nodes.clear()
        world.queued("a").state = Standing[state]
    world.provider.release(SliceId("a"), ZONE)
    assert world.queued("a") is None and world.listed() == {}


@pytest.mark.parametrize("health", ["TIMEOUT", "UNHEALTHY_TENSORFLOW"])
def test_an_unhealthy_node_stays_up_because_its_agents_know_better(world, health):
    up(world, "a")
    world.node("a").health = Health[health]
    for _ in range(6):
        world.pass_time(60)
        seen = world.listed()["a"]
        assert seen.state is CloudState.UP and health in seen.message


def test_a_worker_that_fails_the_health_check_is_only_suspected(world):
    up(world, "a")
    with world.emulator.cloud.lock:
        world.emulator.cloud.kill_host(world.node("a"), 2)
    seen = world.listed()["a"]
    assert (seen.lost_hosts, seen.suspected) == ((2,), True)


def test_maintenance_health_is_a_notice(world):
    up(world, "a")
    world.node("a").health = Health.UNHEALTHY_MAINTENANCE
    assert world.listed()["a"].notice is NoticeKind.MAINTENANCE
    assert world.listed()["a"].state is CloudState.UP


def test_symptoms_of_the_workload_are_not_dead_hosts():
    node = tpu_v2.Node(state=State.READY, health=Health.TIMEOUT)
    oom = tpu_v2.Symptom(symptom_type=tpu_v2.Symptom.SymptomType.HBM_OUT_OF_MEMORY, worker_id="1")
    node.symptoms = [oom]
    assert states.node_state(node)[2] == ()


def test_a_preempted_node_is_deleted_to_free_its_quota(world):
    up(world, "a")
    with world.emulator.cloud.lock:
        world.emulator.cloud.reclaim(world.node("a"), world.clock.now())
    assert world.listed()["a"].state is CloudState.PREEMPTED
    world.provider.release(SliceId("a"), ZONE)
    world.pass_time(2)
    assert world.node("a") is None


def test_a_node_deleted_by_others_is_not_listed_and_its_release_succeeds(world):
    up(world, "a")
    with world.emulator.cloud.lock:
        world.emulator.cloud.vanish(world.node("a"), world.clock.now())
    assert world.listed() == {}
    world.provider.release(SliceId("a"), ZONE)


def test_an_orphaned_queued_resource_that_turns_active_is_released_unpaid(world):
    world.limit(0)
    world.provider.request(order("a", capacity=Capacity.QUEUED))
    assert world.listed()["a"].state is CloudState.PENDING
    world.reopen()  # and the store has forgotten the slice: it is an orphan now
    world.limit(5)
    with world.emulator.cloud.lock:
        world.emulator.queue.retry_waiting(world.clock.now())
    assert world.listed()["a"].state is CloudState.CREATING
    world.provider.release(SliceId("a"), ZONE)
    world.pass_time(600)
    assert world.listed() == {} and world.queued("a") is None
    assert world.paid() == []


def test_a_suspended_gang_is_preempted_as_a_whole(tpus):
    world = tpus()
    up(world, "gang-0", "gang-1")
    with world.emulator.cloud.lock:
        world.emulator.cloud.reclaim(world.node("gang-0"), world.clock.now())
    for _ in range(2):  # suspending, then suspended
        assert {seen.state for seen in world.listed().values()} == {CloudState.PREEMPTED}
        world.pass_time(2)
    world.provider.release(SliceId("gang-0"), ZONE)
    world.provider.release(SliceId("gang-1"), ZONE)
    world.pass_time(2)
    assert world.queued("gang") is None and world.listed() == {}


def test_a_gang_that_waits_too_long_is_refused(tpus):
    world = tpus()
    world.reopen(gang_patience=timedelta(minutes=3))
    world.limit(1)
    world.provider.request(order("gang-0", "gang-1"))
    assert world.listed()["gang-0"].state is CloudState.PENDING
    world.pass_time(180)
    seen = world.listed()["gang-1"]
    assert seen.state is CloudState.REFUSED and "180 s" in seen.message
    world.provider.release(SliceId("gang-0"), ZONE)
    world.provider.release(SliceId("gang-1"), ZONE)
    assert world.queued("gang") is None
