"""Queued resources of the emulated cloud, through Google's client."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from google.api_core import exceptions
from google.cloud import tpu_v2

from tests.testbed.cloud_tpu.clients import PARENT, queued
from tpufleet_testbed.cloud_tpu.capacity import CapacityLimit, CloudCapacity


def create(world, name, request):
    world.client.create_queued_resource(
        parent=PARENT, queued_resource_id=name, queued_resource=request, timeout=900
    ).result(timeout=900)


def delete(world, name, force=True):
    world.client.delete_queued_resource(
        request={"name": f"{PARENT}/queuedResources/{name}", "force": force}, timeout=900
    )


def preempt(world, name):
    cloud = world.emulator.cloud
    with cloud.lock:
        cloud.reclaim(cloud.nodes[f"{PARENT}/nodes/{name}"], cloud.run_due())


def test_a_gang_becomes_active_when_all_nodes_are_ready(world):
    create(world, "gang", queued("gang", "gang"))
    assert world.queue_state("gang") == "PROVISIONING"
    world.advance(90)
    assert world.queue_state("gang") == "ACTIVE"
    assert world.state("gang-0") == world.state("gang-1") == "READY"


def test_a_request_waits_for_stock(emulated):
    world = emulated(stock=CloudCapacity(nodes=(CapacityLimit(most=2),)))
    create(world, "first", queued("first", "first"))
    create(world, "second", queued("second"))
    assert world.queue_state("second") == "WAITING_FOR_RESOURCES"
    delete(world, "first")
    world.advance(20)
    assert world.queue_state("second") == "PROVISIONING"


def test_a_request_past_its_valid_until_time_fails(emulated):
    world = emulated(stock=CloudCapacity(nodes=(CapacityLimit(most=0),)))
    policy = tpu_v2.QueuedResource.QueueingPolicy(valid_until_duration=timedelta(hours=1))
    create(world, "late", queued("late", queueing_policy=policy))
    world.advance(3600)
    assert world.queue_state("late") == "FAILED"
    shown = world.client.get_queued_resource(name=f"{PARENT}/queuedResources/late")
    assert "valid until" in shown.state.failed_data.error.message


def test_preempting_one_node_suspends_the_whole_request(world):
    create(world, "gang", queued("gang", "gang"))
    world.advance(90)
    assert world.queue_state("gang") == "ACTIVE"
    preempt(world, "gang-0")
    assert world.queue_state("gang") == "SUSPENDING"
    world.advance(20)
    assert world.queue_state("gang") == "SUSPENDED"
    assert list(world.client.list_nodes(parent=PARENT)) == []
    world.client.reset_queued_resource(name=f"{PARENT}/queuedResources/gang", timeout=900)
    assert world.queue_state("gang") == "PROVISIONING"


def test_a_request_with_nodes_is_only_deleted_with_force(world):
    create(world, "one", queued("one"))
    with pytest.raises(exceptions.FailedPrecondition):
        delete(world, "one", force=False)
    delete(world, "one")
    assert world.queue_state("one") == "DELETING"
    world.advance(20)
    with pytest.raises(exceptions.NotFound):
        world.queue_state("one")
    assert world.billed() == []
