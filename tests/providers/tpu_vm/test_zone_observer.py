"""Zones do not wait for one another, and rates adapt."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.providers.tpu_vm.emulated_tpus import OTHER_ZONE, ZONE, order
from tpufleet.errors import ProviderBusy, ProviderUnavailable, RateLimited
from tpufleet.model.cloud_slices import CloudState
from tpufleet.model.slices import SliceId
from tpufleet.providers.tpu_vm import rate_limit
from tpufleet.testbed.cloud_tpu.fault_plan import CallFault, CloudFaultPlan


def test_one_listing_is_two_paged_calls_for_each_zone(world):
    for index in range(30):
        world.provider.request(order(f"n{index}", accelerator="v5e-4"))
    before = len(world.emulator.service.calls)
    assert len(world.listed()) == 30
    made = world.emulator.service.calls[before:]
    assert sorted(made) == sorted(
        (method, zone)
        for zone in (ZONE, OTHER_ZONE)
        for method in ("ListNodes", "ListQueuedResources")
    )


def test_a_zone_that_fails_is_unseen_and_the_others_are_listed(tpus):
    plan = CloudFaultPlan(calls=(CallFault(error="unavailable", method="List*", zone=OTHER_ZONE),))
    world = tpus(plan=plan)
    world.provider.request(order("a"))
    listing = world.provider.listing()
    assert [cloud.id for cloud in listing] == ["a"]
    assert listing.unseen == {OTHER_ZONE}


@pytest.mark.parametrize("method", ["ListNodes", "ListQueuedResources"])
def test_a_listing_that_the_api_calls_incomplete_is_no_listing(tpus, method):
    """Otherwise every slice that it lacks would be taken for lost."""
    fault = CallFault(error="unreachable", method=method, zone=ZONE, calls=(2,))
    world = tpus(plan=CloudFaultPlan(calls=(fault,)))
    world.provider.request(order("a"))
    world.provider.request(order("b", zone=OTHER_ZONE))
    assert set(world.listed()) == {"a", "b"}
    partial = world.provider.listing()
    assert [cloud.id for cloud in partial] == ["b"] and partial.unseen == {ZONE}
    assert set(world.listed()) == {"a", "b"}


def test_when_no_zone_answers_the_listing_fails(tpus):
    world = tpus(plan=CloudFaultPlan(calls=(CallFault(error="unavailable", method="List*"),)))
    with pytest.raises(ProviderUnavailable):
        world.provider.listing()


def test_a_zone_that_hangs_holds_nobody_up_once_its_usual_time_is_known(tpus):
    hang = CallFault(error="hang", method="List*", zone=OTHER_ZONE, calls=tuple(range(2, 100)))
    world = tpus(plan=CloudFaultPlan(calls=(hang,)), deadline=60.0, patience=3.0)
    world.provider.request(order("a"))
    assert world.provider.listing().unseen == frozenset()
    for _ in range(3):
        begun = time.monotonic()
        listing = world.provider.listing()
        assert time.monotonic() - begun < 15, "the calls themselves hang for a minute"
        assert listing.unseen == {OTHER_ZONE}
        assert [cloud.id for cloud in listing] == ["a"]


def test_a_create_that_was_throttled_slows_the_next_ones_down_and_success_speeds_them_up():
    now = [0.0]
    pace = rate_limit.ZoneRateLimit("z", lambda: now[0])
    pace.acquire()
    for _ in range(10):
        pace.on_rate_limited()
    assert pace.rate == rate_limit.MIN_RATE
    with pytest.raises(RateLimited):
        pace.acquire()
    now[0] += 1 / rate_limit.MIN_RATE
    pace.acquire()
    for _ in range(1000):
        pace.on_success()
    assert pace.rate == rate_limit.MAX_RATE


def test_throttling_of_one_zone_leaves_the_others_alone(tpus):
    plan = CloudFaultPlan(calls=(CallFault(error="rate", method="CreateNode", zone=ZONE),))
    world = tpus(plan=plan)
    with pytest.raises(RateLimited):
        world.provider.request(order("a"))
    asked = len(world.calls("CreateNode"))
    with pytest.raises(RateLimited, match="complained"):
        world.provider.request(order("a"))
    assert len(world.calls("CreateNode")) == asked, "not even asked"
    world.provider.request(order("b", zone=OTHER_ZONE))
    assert world.listed()["b"].state is CloudState.CREATING


def test_a_zone_whose_calls_hang_gets_no_more_of_them():
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


def test_a_release_that_the_api_is_not_ready_for_is_tried_again(tpus):
    plan = CloudFaultPlan(calls=(CallFault(error="conflict", method="DeleteNode", calls=(1,)),))
    world = tpus(plan=plan)
    world.provider.request(order("a"))
    with pytest.raises(ProviderBusy):
        world.provider.release(SliceId("a"), ZONE)
    world.provider.release(SliceId("a"), ZONE)
    world.pass_time(2)
    assert world.listed() == {}
