"""Zones are observed independently, and rate limits adapt."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from msgspec import structs

from tests.providers.tpu_vm.emulated_tpus import OTHER_ZONE, ZONE, order
from tpufleet.errors import ProviderBusy, ProviderUnavailable, RateLimited
from tpufleet.model.fleet.cloud_slices import CloudState, ExpectedSlice
from tpufleet.model.fleet.slices import SliceId
from tpufleet.providers.tpu_vm import rate_limit, zone_observer
from tpufleet_testbed.cloud_tpu.capacity import CapacityLimit, CloudCapacity
from tpufleet_testbed.cloud_tpu.fault_plan import CallFault, CloudFaultPlan
from tpufleet_testbed.cloud_tpu.locations import IMMEDIATE
from tpufleet_testbed.cloud_tpu.nodes import State


def test_one_listing_is_two_paged_calls_for_each_zone(world):
    for index in range(30):
        world.provider.request(order(f"n{index}", accelerator="v5e-4"))
    before = len(world.emulator.service.calls)
    assert len(world.listed()) == 30
    calls = world.emulator.service.calls[before:]
    # Maintenance is asked for where nodes exist, every ten minutes.
    assert calls.count(("v2alpha1.ListNodes", ZONE)) == 1
    calls = [call for call in calls if call[0] != "v2alpha1.ListNodes"]
    assert sorted(calls) == sorted(
        (method, zone)
        for zone in (ZONE, OTHER_ZONE)
        for method in ("ListNodes", "ListQueuedResources")
    )


def test_a_failing_zone_is_unreachable_and_the_others_are_listed(tpus):
    plan = CloudFaultPlan(calls=(CallFault(error="unavailable", method="List*", zone=OTHER_ZONE),))
    world = tpus(plan=plan)
    world.provider.request(order("a"))
    listing = world.provider.listing()
    assert [cloud.id for cloud in listing] == ["a"]
    assert listing.unreachable_zones == {OTHER_ZONE}


@pytest.mark.parametrize("method", ["ListNodes", "ListQueuedResources"])
def test_an_incomplete_listing_counts_as_unreachable(tpus, method):
    """Otherwise the missing slices would be treated as lost."""
    fault = CallFault(error="unreachable", method=method, zone=ZONE, calls=(2,))
    world = tpus(plan=CloudFaultPlan(calls=(fault,)))
    world.provider.request(order("a"))
    world.provider.request(order("b", zone=OTHER_ZONE))
    assert set(world.listed()) == {"a", "b"}
    partial = world.provider.listing()
    assert [cloud.id for cloud in partial] == ["b"] and partial.unreachable_zones == {ZONE}
    assert set(world.listed()) == {"a", "b"}


def test_a_preempted_node_is_fenced_while_its_siblings_are_still_deleted(world):
    """So a new attempt waits for processes of the siblings alone, which their agents report."""
    world.provider.request(order("a", "b"))
    world.pass_time(30)
    assert {each.state for each in world.listed().values()} == {CloudState.UP}
    with world.emulator.cloud.lock:
        now = world.emulator.cloud.run_due()
        [first, _] = sorted(world.emulator.cloud.nodes.values(), key=lambda node: node.slice_index)
        world.emulator.cloud.reclaim(first, now, State.PREEMPTED)
    listed = world.listed()
    assert {each.state for each in listed.values()} == {CloudState.PREEMPTED}
    assert listed["a"].fenced and not listed["b"].fenced
    world.pass_time(5)
    assert all(each.fenced for each in world.listed().values())


def test_the_listing_fails_if_no_zone_responds(tpus):
    world = tpus(plan=CloudFaultPlan(calls=(CallFault(error="unavailable", method="List*"),)))
    with pytest.raises(ProviderUnavailable):
        world.provider.listing()


def test_a_hanging_zone_does_not_delay_the_listing(tpus):
    hang = CallFault(error="hang", method="List*", zone=OTHER_ZONE, calls=tuple(range(2, 100)))
    world = tpus(plan=CloudFaultPlan(calls=(hang,)), deadline=60.0, patience=3.0)
    world.provider.request(order("a"))
    assert world.provider.listing().unreachable_zones == frozenset()
    for _ in range(3):
        begun = time.monotonic()
        listing = world.provider.listing()
        assert time.monotonic() - begun < 45, "the calls themselves hang for a minute"
        assert listing.unreachable_zones == {OTHER_ZONE}
        assert [cloud.id for cloud in listing] == ["a"]


def test_the_rate_halves_on_rate_limit_errors_and_grows_on_success():
    now = [0.0]
    pace = rate_limit.ZoneRateLimit("z", lambda: now[0])
    for _ in range(10):
        now[0] += 1 / rate_limit.MIN_RATE
        with pytest.raises(RateLimited, match="too many"), pace.track_create():
            raise RateLimited("too many requests")
    assert pace.rate == rate_limit.MIN_RATE
    with pytest.raises(RateLimited, match=r"limited to 0\.2 creates/s"), pace.track_create():
        pass
    for _ in range(1000):
        now[0] += 1 / rate_limit.MIN_RATE
        with pace.track_create():
            pass
    assert pace.rate == rate_limit.MAX_RATE


def test_rate_limits_of_one_zone_do_not_affect_others(tpus):
    plan = CloudFaultPlan(calls=(CallFault(error="rate", method="CreateNode", zone=ZONE),))
    world = tpus(plan=plan)
    with pytest.raises(RateLimited):
        world.provider.request(order("a"))
    asked = len(world.calls("CreateNode"))
    with pytest.raises(RateLimited, match="rate limit"):
        world.provider.request(order("a"))
    assert len(world.calls("CreateNode")) == asked, "no call was sent"
    world.provider.request(order("b", zone=OTHER_ZONE))
    assert world.listed()["b"].state is CloudState.CREATING


def test_a_zone_with_hanging_calls_gets_no_more():
    now = [0.0]
    pace = rate_limit.ZoneRateLimit("z", lambda: now[0])
    hanging = [pace.track_call() for _ in range(rate_limit.MAX_HANGING_CALLS)]
    for call in hanging:
        call.__enter__()
    with pace.track_call():
        pass
    now[0] += rate_limit.HANGING_AFTER + 1
    with pytest.raises(ProviderUnavailable, match="hang"), pace.track_call():
        pass
    hanging[0].__exit__(None, None, None)
    with pace.track_call():
        pass


def test_a_conflicting_release_can_be_retried(tpus):
    plan = CloudFaultPlan(calls=(CallFault(error="conflict", method="DeleteNode", calls=(1,)),))
    world = tpus(plan=plan)
    world.provider.request(order("a"))
    with pytest.raises(ProviderBusy):
        world.provider.release(SliceId("a"), ZONE)
    world.provider.release(SliceId("a"), ZONE)
    world.pass_time(2)
    assert world.listed() == {}


def test_refused_creations_beyond_the_limit_of_one_observation_are_not_lost(tpus):
    latencies = replace(IMMEDIATE, stockout=timedelta(seconds=15))
    world = tpus(stock=CloudCapacity(nodes=(CapacityLimit(most=0),)), latencies=latencies)
    names = [f"n{index}" for index in range(zone_observer.MAX_OPERATIONS + 10)]
    for name in names:
        world.provider.request(order(name, accelerator="v5e-4"))
        world.pass_time(0.1)
    world.pass_time(20)
    listed = world.listed()
    assert set(listed) == set(names)
    assert {each.state for each in listed.values()} == {CloudState.REFUSED, CloudState.CREATING}
    for name, each in listed.items():
        if each.state is CloudState.REFUSED:
            world.provider.release(SliceId(name), ZONE)
    assert {each.state for each in world.listed().values()} == {CloudState.REFUSED}


def test_nodes_that_a_listing_lacks_are_read_by_name_and_only_once_if_they_are_gone(tpus):
    fault = CallFault(error="omitted", method="ListNodes", zone=ZONE, calls=tuple(range(2, 9)))
    world = tpus(plan=CloudFaultPlan(calls=(fault,)))
    world.provider.request(order("a"))
    world.pass_time(10)
    expected = [ExpectedSlice(id=SliceId(name), zone=ZONE) for name in ("a", "b")]
    assert {each.id for each in world.provider.listing(expected)} == {"a"}
    for _ in range(3):
        assert {each.id for each in world.provider.listing(expected)} == {"a"}
    assert len(world.calls("GetNode")) == 1 + 3, "b once, a whenever it is not listed"


def test_nodes_of_another_server_are_told_once(world, caplog):
    """A new server on the same project does not own what the old one left."""
    world.provider.request(structs.replace(order("left", accelerator="v5e-4"), fleet="old"))
    for _ in range(2):
        world.listed()
    assert caplog.text.count("has 1 TPU VMs of another server (fleet old)") == 1
