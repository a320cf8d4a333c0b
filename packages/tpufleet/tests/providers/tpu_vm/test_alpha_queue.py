"""Queued resources with flex-start and in reservations of calendar mode, over REST: the bodies are
compared with those of `gcloud alpha compute tpus queued-resources create`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.providers.orders import order
from tests.providers.tpu_vm.emulated_tpus import ZONE, EmulatedTpus
from tpufleet.errors import NoCapacity, PermissionMissing
from tpufleet.model.fleet.cloud_slices import CloudState
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet_testbed.cloud_tpu.fault_plan import CloudFaultPlan
from tpufleet_testbed.compute_engine.fault_plan import ComputeFaultPlan, ReservedCapacity

HOUR = timedelta(hours=1)
PARENT = f"projects/my-project/locations/{ZONE}"


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[..., EmulatedTpus]]:
    opened: list[EmulatedTpus] = []

    def make(**emulator: Any) -> EmulatedTpus:
        opened.append(EmulatedTpus(tmp_path, **emulator))
        return opened[-1]

    yield make
    for world in opened:
        world.close()


def bodies(world: EmulatedTpus) -> list[dict[str, Any]]:
    return world.emulator.project.queued.requests


def becomes(world: EmulatedTpus, name: str, state: CloudState) -> Any:
    for _ in range(60):
        found = world.listed().get(name)
        if found is not None and found.state is state:
            return found
        world.pass_time(5)
    raise AssertionError(world.listed())


def test_queued_capacity_with_a_run_duration_is_flex_start(worlds):
    world = worlds()
    world.reopen(max_run_duration=HOUR, valid_for=2 * HOUR)
    world.provider.request(order("a", capacity=Capacity.QUEUED))
    [body] = bodies(world)
    assert body["provisioningModel"] == "FLEX_START"
    assert body["runDuration"] == {"maxRunDuration": "3600s"}
    assert body["queueingPolicy"] == {"validUntilDuration": "7260s"}
    [spec] = body["tpu"]["nodeSpec"]
    assert (spec["parent"], spec["nodeId"]) == (PARENT, "a")
    assert spec["node"]["acceleratorType"] == "v5litepod-16"
    assert "spot" not in body and "guaranteed" not in body
    becomes(world, "a", CloudState.UP)


def test_the_end_of_the_run_duration_is_no_fault_of_the_job_and_leaves_nothing(worlds):
    world = worlds()
    world.reopen(max_run_duration=HOUR)
    world.provider.request(order("a", capacity=Capacity.QUEUED))
    created_at = world.clock.now()
    assert becomes(world, "a", CloudState.UP).ends_at == created_at + HOUR
    world.pass_time(3600)
    ended = becomes(world, "a", CloudState.PREEMPTED)
    assert "the run duration of flex-start is over" in ended.message
    world.provider.release(SliceId("a"), ZONE)
    world.pass_time(60)
    assert world.listed() == {} and world.queued("a") is None


def test_a_gang_has_the_name_that_v2alpha1_gives_it(worlds):
    world = worlds()
    world.reopen(max_run_duration=HOUR)
    world.provider.request(order("g-0", "g-1", capacity=Capacity.QUEUED))
    [spec] = bodies(world)[0]["tpu"]["nodeSpec"]
    assert spec["multiNodeParams"] == {"nodeCount": 2, "nodeIdPrefix": "g"}
    becomes(world, "g-1", CloudState.UP)


def test_a_repeated_request_creates_nothing_twice(worlds):
    world = worlds()
    world.reopen(max_run_duration=HOUR)
    for _ in range(2):
        world.provider.request(order("a", capacity=Capacity.QUEUED))
    assert len(bodies(world)) == 2
    assert len(world.emulator.queue.records) == 1


@pytest.mark.parametrize(
    ("until", "model"), [(timedelta(days=1), "RESERVATION_BOUND"), (None, None)]
)
def test_a_reservation_of_calendar_mode_needs_nodes_that_are_bound_to_it(worlds, until, model):
    held = ReservedCapacity(name="held", zone=ZONE, machine="ct5p-hightpu-4t", vms=4, until=until)
    world = worlds(plan=CloudFaultPlan(compute=ComputeFaultPlan(reservations=(held,))))
    world.reopen(reservation="held")
    world.provider.request(order("a", accelerator="v5p-8", capacity=Capacity.RESERVED))
    assert [body["provisioningModel"] for body in bodies(world)] == ([model] if model else [])
    assert world.queued("a").request.reservation_name == f"{PARENT}/reservations/held"
    becomes(world, "a", CloudState.UP)


def test_a_reservation_of_calendar_mode_is_waited_for_until_it_begins(worlds):
    held = ReservedCapacity(
        name="held", zone=ZONE, machine="ct5p-hightpu-4t", vms=4, after=HOUR, until=48 * HOUR
    )
    world = worlds(plan=CloudFaultPlan(compute=ComputeFaultPlan(reservations=(held,))))
    world.reopen(reservation="held")
    reserved = order("a", accelerator="v5p-8", capacity=Capacity.RESERVED)
    with pytest.raises(NoCapacity, match="begins at"):
        world.provider.request(reserved)
    assert bodies(world) == [] and world.queued("a") is None
    world.pass_time(3600 + 121)
    world.provider.request(reserved)
    becomes(world, "a", CloudState.UP)


def test_a_reservation_of_calendar_mode_ends_what_is_bound_to_it_at_a_known_time(worlds):
    held = ReservedCapacity(name="held", zone=ZONE, machine="ct5p-hightpu-4t", vms=4, until=HOUR)
    world = worlds(plan=CloudFaultPlan(compute=ComputeFaultPlan(reservations=(held,))))
    world.reopen(reservation="held")
    end = world.clock.now() + HOUR
    reserved, other = (
        order(name, accelerator="v5p-8", capacity=Capacity.RESERVED) for name in ("a", "b")
    )
    world.provider.request(reserved)
    assert becomes(world, "a", CloudState.UP).ends_at == end
    world.pass_time(50 * 60)
    with pytest.raises(NoCapacity, match=f"ends at {end:%Y-%m-%d %H:%M}"):
        world.provider.request(other)
    world.pass_time(10 * 60)
    world.reopen()
    assert "the reservation ended" in becomes(world, "a", CloudState.PREEMPTED).message
    with pytest.raises(NoCapacity, match=f"ended at {end:%Y-%m-%d %H:%M}"):
        world.provider.request(other)
    world.provider.release(SliceId("a"), ZONE)
    world.pass_time(60)
    assert world.listed() == {} and world.queued("a") is None


def test_refusals_are_those_of_the_api(worlds):
    world = worlds()
    world.reopen(max_run_duration=HOUR)
    world.emulator.cloud.zones = ()
    with pytest.raises(PermissionMissing, match="tpu init check"):
        world.provider.request(order("a", capacity=Capacity.QUEUED))
    assert world.emulator.queue.records == {}
