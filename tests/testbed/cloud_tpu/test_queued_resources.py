"""Queued resources of the emulated cloud, through Google's client."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from google.api_core import exceptions
from google.cloud import tpu_v2

from tests.testbed.cloud_tpu.clients import PARENT, queued
from tpufleet.testbed.cloud_tpu.capacity import CapacityLimit, CloudCapacity


def ask(world, name, request):
    world.client.create_queued_resource(
        parent=PARENT, queued_resource_id=name, queued_resource=request, timeout=60
    ).result(timeout=60)


def drop(world, name, force=True):
    world.client.delete_queued_resource(
        request={"name": f"{PARENT}/queuedResources/{name}", "force": force}, timeout=60
    )


def take(world, name):
    cloud = world.emulator.cloud
    with cloud.lock:
        cloud.reclaim(cloud.nodes[f"{PARENT}/nodes/{name}"], cloud.run_due())


def test_a_gang_is_provisioned_and_becomes_active_whole(world):
    ask(world, "gang", queued("gang", "gang"))
    assert world.queue_state("gang") == "PROVISIONING"
    world.advance(90)
    assert world.queue_state("gang") == "ACTIVE"
    assert world.state("gang-0") == world.state("gang-1") == "READY"


def test_a_request_waits_for_stock_and_is_served_when_there_is_some(emulated):
    world = emulated(stock=CloudCapacity(nodes=(CapacityLimit(most=2),)))
    ask(world, "first", queued("first", "first"))
    ask(world, "second", queued("second"))
    assert world.queue_state("second") == "WAITING_FOR_RESOURCES"
    drop(world, "first")
    world.advance(20)
    assert world.queue_state("second") == "PROVISIONING"


def test_a_request_that_is_not_served_in_time_fails_and_says_so(emulated):
    world = emulated(stock=CloudCapacity(nodes=(CapacityLimit(most=0),)))
    policy = tpu_v2.QueuedResource.QueueingPolicy(valid_until_duration=timedelta(hours=1))
    ask(world, "late", queued("late", queueing_policy=policy))
    world.advance(3600)
    assert world.queue_state("late") == "FAILED"
    shown = world.client.get_queued_resource(name=f"{PARENT}/queuedResources/late")
    assert "valid until" in shown.state.failed_data.error.message


def test_when_one_node_is_taken_the_whole_request_is_suspended(world):
    ask(world, "gang", queued("gang", "gang"))
    world.advance(90)
    assert world.queue_state("gang") == "ACTIVE"
    take(world, "gang-0")
    assert world.queue_state("gang") == "SUSPENDING"
    world.advance(20)
    assert world.queue_state("gang") == "SUSPENDED"
    assert list(world.client.list_nodes(parent=PARENT)) == []
    world.client.reset_queued_resource(name=f"{PARENT}/queuedResources/gang", timeout=60)
    assert world.queue_state("gang") == "PROVISIONING"


def test_a_request_with_nodes_is_only_deleted_by_force(world):
    ask(world, "one", queued("one"))
    with pytest.raises(exceptions.FailedPrecondition):
        drop(world, "one", force=False)
    drop(world, "one")
    assert world.queue_state("one") == "DELETING"
    world.advance(20)
    with pytest.raises(exceptions.NotFound):
        world.queue_state("one")
    assert world.billed() == []
