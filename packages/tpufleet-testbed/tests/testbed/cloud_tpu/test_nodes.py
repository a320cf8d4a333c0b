"""Nodes of the emulated cloud, through Google's client."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from google.api_core import exceptions

from tests.testbed.cloud_tpu.clients import PARENT, ZONE, node
from tests.testbed.cloud_tpu.emulated_cloud import FIXED
from tpufleet.errors import BadInput
from tpufleet_testbed.cloud_tpu import fault_plan
from tpufleet_testbed.cloud_tpu.capacity import CapacityLimit, CloudCapacity
from tpufleet_testbed.cloud_tpu.fault_plan import (
    CallFault,
    CloudFaultPlan,
    PreemptionStorm,
    ZoneOutage,
)


def create(world, name, **options):
    return world.client.create_node(parent=PARENT, node_id=name, node=node(**options), timeout=900)


def names(world):
    return [listed.name.rpartition("/")[2] for listed in world.client.list_nodes(parent=PARENT)]


def test_a_node_is_created_by_a_long_running_operation(world):
    operation = create(world, "a", labels={"team": "x"})
    assert not operation.done() and world.state("a") == "CREATING"
    world.advance(90)
    created = operation.result(timeout=900)
    assert created.state.name == "READY" and created.health.name == "HEALTHY"
    assert created.labels["team"] == "x" and len(created.network_endpoints) == 1


def test_a_node_is_billed_from_ready_until_deletion_starts(world):
    create(world, "a")
    world.advance(90)
    assert world.state("a") == "READY"
    world.advance(600)
    operation = world.client.delete_node(name=f"{PARENT}/nodes/a", timeout=900)
    assert world.state("a") == "DELETING" and not operation.done()
    world.advance(20)
    with pytest.raises(exceptions.NotFound):
        world.state("a")
    assert operation.done()
    assert world.billed() == [("a", 600.0)]


def test_listings_are_paginated(world):
    for index in range(250):
        create(world, f"n{index}")
    pages = list(world.client.list_nodes(request={"parent": PARENT, "page_size": 100}).pages)
    assert [len(page.nodes) for page in pages] == [100, 100, 50]
    assert len(names(world)) == 250


@pytest.mark.parametrize("late", [False, True], ids=["at once", "later"])
def test_without_stock_the_operation_fails_with_the_message_of_the_api(emulated, late):
    latencies = replace(FIXED, stockout=timedelta(seconds=30 if late else 0))
    world = emulated(stock=CloudCapacity(nodes=(CapacityLimit(most=1),)), latencies=latencies)
    create(world, "a")
    operation = create(world, "b")
    if late:
        assert not operation.done() and world.state("b") == "CREATING"
        world.advance(30)
    assert operation.done()
    error = operation.exception(timeout=900)
    assert isinstance(error, exceptions.ResourceExhausted)
    assert 'no more capacity in the zone "us-central1-a"' in str(error)
    assert names(world) == ["a"]


def test_stock_that_is_reserved_is_listed_as_a_reservation_with_what_is_used_of_it(emulated):
    limit = CapacityLimit(most=3, accelerator="v5litepod-4", capacity="reserved", zone=ZONE)
    world = emulated(stock=CloudCapacity(nodes=(limit, CapacityLimit(most=9, capacity="spot"))))
    create(world, "spot")
    reserved = node(spot=False)
    reserved.scheduling_config.reserved = True
    world.client.create_node(parent=PARENT, node_id="a", node=reserved, timeout=900)
    [found] = world.alpha_client.list_reservations({"parent": PARENT})
    assert found.name == f"{PARENT}/reservations/reservation-0" and found.state.name == "ACTIVE"
    shown = found.standard
    assert (shown.size, shown.usage.total, shown.capacity_units.name) == (12, 4, "CHIPS")
    everywhere = world.alpha_client.list_reservations({"parent": "projects/p/locations/-"})
    assert [each.name for each in everywhere] == [found.name]


def test_exceeding_quota_fails_the_call_and_preempted_nodes_count(emulated):
    world = emulated(stock=CloudCapacity(quota=(CapacityLimit(most=4, capacity="spot"),)))
    create(world, "a")
    world.advance(90)
    world.state("a")
    with world.emulator.cloud.lock:
        world.emulator.cloud.reclaim(
            world.emulator.cloud.nodes[f"{PARENT}/nodes/a"], world.clock.now()
        )
    assert world.state("a") == "PREEMPTED"
    with pytest.raises(exceptions.ResourceExhausted, match=r"Quota limit .* Limit: 4"):
        create(world, "b")
    world.client.delete_node(name=f"{PARENT}/nodes/a", timeout=900)
    world.advance(20)
    create(world, "b")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        pytest.param("A", {}, "node id", id="capital letter"),
        pytest.param("a", {"accelerator": "v5e-4"}, "v5e-4", id="alias"),
        pytest.param("a", {"accelerator": "v5litepod-17"}, "v5litepod-17", id="unknown type"),
        pytest.param("a", {"labels": {"Team": "x"}}, "label", id="label"),
        pytest.param("a", {"metadata": {"x": "y" * 600_000}}, "metadata", id="metadata"),
    ],
)
def test_invalid_nodes_are_rejected(world, name, options, message):
    with pytest.raises(exceptions.InvalidArgument, match=message):
        create(world, name, **options)


def test_an_unknown_zone_is_denied(world):
    with pytest.raises(exceptions.PermissionDenied):
        list(world.client.list_nodes(parent="projects/p/locations/us-nowhere1-a", timeout=900))


def test_a_node_can_be_stopped_and_started(world):
    create(world, "a")
    world.advance(90)
    world.client.stop_node(request={"name": f"{PARENT}/nodes/a"}, timeout=900).result(timeout=900)
    assert world.state("a") == "STOPPED"
    world.advance(1000)
    starting = world.client.start_node(request={"name": f"{PARENT}/nodes/a"}, timeout=900)
    assert world.state("a") == "STARTING"
    world.advance(90)
    assert starting.result(timeout=900).state.name == "READY"
    world.advance(10)
    assert world.billed() == [("a", 0.0), ("a", 10.0)]


def test_a_call_fault_hits_the_call_with_its_number(emulated):
    plan = CloudFaultPlan(calls=(CallFault(error="unavailable", method="CreateNode", calls=(2,)),))
    world = emulated(plan=plan)
    create(world, "a")
    with pytest.raises(exceptions.ServiceUnavailable):
        create(world, "b")
    create(world, "b")


def test_random_faults_repeat_for_the_same_seed(emulated):
    plan = CloudFaultPlan(seed=7, calls=(CallFault(error="internal", probability=0.5),))

    def run() -> list[bool]:
        world, succeeded = emulated(plan=plan), []
        for _ in range(20):
            try:
                list(world.client.list_nodes(parent=PARENT, timeout=900))
                succeeded.append(True)
            except exceptions.InternalServerError:
                succeeded.append(False)
        return succeeded

    first = run()
    assert first == run()
    assert 3 < sum(first) < 17


def test_a_call_fault_ends_at_its_until_time(emulated):
    plan = CloudFaultPlan(calls=(CallFault(error="rate", until=timedelta(seconds=60)),))
    world = emulated(plan=plan)
    with pytest.raises(exceptions.ResourceExhausted) as caught:
        create(world, "a")
    assert caught.value.reason == "RATE_LIMIT_EXCEEDED"
    world.advance(60)
    create(world, "a")


def test_a_storm_preempts_a_share_of_the_spot_nodes_only(emulated):
    world = emulated(
        plan=CloudFaultPlan(
            seed=3, storms=(PreemptionStorm(every=timedelta(minutes=5), share=0.5),)
        )
    )
    for index in range(40):
        create(world, f"spot{index}")
        create(world, f"kept{index}", spot=False)
    world.advance(360)
    listing = world.client.list_nodes(request={"parent": PARENT, "page_size": 100})
    states = {listed.name.rpartition("/")[2]: listed.state.name for listed in listing}
    preempted = [name for name, state in states.items() if state == "PREEMPTED"]
    assert 10 <= len(preempted) <= 30
    assert all(name.startswith("spot") for name in preempted)


def test_a_zone_outage_preempts_spot_nodes_and_denies_capacity_until_it_ends(emulated):
    closing = ZoneOutage(
        zone="us-central1-a", after=timedelta(minutes=5), until=timedelta(minutes=9)
    )
    world = emulated(plan=CloudFaultPlan(closings=(closing,)))
    create(world, "a")
    world.advance(300)
    assert world.state("a") == "PREEMPTED"
    assert isinstance(create(world, "b").exception(timeout=900), exceptions.ResourceExhausted)
    world.advance(240)
    assert create(world, "b").done() is False


def test_labels_and_disks_can_be_updated_but_not_the_type(world):
    create(world, "a")
    world.advance(90)
    fetched = world.client.get_node(name=f"{PARENT}/nodes/a", timeout=900)
    fetched.labels["team"] = "vision"
    fetched.data_disks = [{"source_disk": f"projects/p/zones/{ZONE}/disks/d"}]
    mask = {"paths": ["labels", "data_disks"]}
    world.client.update_node(node=fetched, update_mask=mask, timeout=900).result(timeout=900)
    changed = world.client.get_node(name=f"{PARENT}/nodes/a", timeout=900)
    assert changed.labels["team"] == "vision"
    assert changed.data_disks[0].source_disk.endswith("/d")
    with pytest.raises(exceptions.InvalidArgument):
        mask = {"paths": ["accelerator_type"]}
        world.client.update_node(node=fetched, update_mask=mask, timeout=900)


def test_deleting_an_operation_affects_no_other_and_frees_no_name(world):
    first, second = create(world, "a"), create(world, "b")
    world.client.delete_operation({"name": first.operation.name}, timeout=900)
    third = create(world, "c")
    assert third.operation.name != second.operation.name
    world.advance(90)
    assert second.exception(timeout=900) is None and third.exception(timeout=900) is None


def test_accelerator_types_and_runtime_versions_are_listed(world):
    types = [listed.type_ for listed in world.client.list_accelerator_types(parent=PARENT)]
    assert "v5litepod-16" in types and "tpu7x-8" not in types
    versions = [listed.version for listed in world.client.list_runtime_versions(parent=PARENT)]
    assert "v2-alpha-tpuv6e" in versions


def test_a_plan_with_an_unknown_error_is_rejected(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("seed: 1\ncalls: [{error: quota, after: 5m, probability: 0.1}]\n")
    assert fault_plan.load(file).calls[0].after.total_seconds() == 300
    file.write_text("calls: [{error: gremlins}]\n")
    with pytest.raises(BadInput, match="gremlins"):
        fault_plan.load(file)
