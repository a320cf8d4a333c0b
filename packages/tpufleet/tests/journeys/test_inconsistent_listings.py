"""Listings of the Cloud TPU API that lack nodes which exist, or still have nodes which do not: no
job restarts, no two copies of it run, and nothing is left to pay for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.contract.fake_store import FakeStore
from tests.journeys.simulated_fleet import SECOND, SimulatedFleet
from tests.journeys.simulated_hosts import Program
from tests.journeys.storm_cloud import StormyTpuVmCloud
from tests.providers.tpu_vm.emulated_tpus import order
from tpufleet.model.job.jobs import JobState
from tpufleet.stores.base import EventQuery
from tpufleet_testbed.cloud_tpu import api_errors
from tpufleet_testbed.cloud_tpu.fault_plan import CallFault, CloudFaultPlan
from tpufleet_testbed.cloud_tpu.locations import Latencies

ZONE = "us-central1-a"
BOOT, FAULT_AT, FAULT_FOR = 20, 60, 120  # seconds


class TpuVmFleet(SimulatedFleet):
    def __init__(self, folder: Path, plan: CloudFaultPlan) -> None:
        clouds: list[StormyTpuVmCloud] = []

        def make(clock):
            clouds.append(StormyTpuVmCloud(clock, folder, [ZONE], plan))
            return clouds

        super().__init__(folder, FakeStore(), other_clouds=make)
        [self.tpus] = clouds
        self.invariants.release_bound = timedelta(minutes=3)

    def run_job(self, steps: int = 400, **fields):
        fields = {"accelerator": "v5litepod-4", "providers": ["tpu-vm"], **fields}
        return self.submit(Program(steps=steps, checkpoint_every=30), **fields)

    def nodes_made(self) -> int:
        return len(self.tpus.emulator.cloud.ledger.entries)

    def nothing_is_paid(self) -> bool:
        return not self.tpus.emulator.cloud.ledger.running()

    def close(self) -> None:
        super().close()
        self.tpus.close()


@pytest.fixture
def tpu_vm_fleet(tmp_path: Path) -> Iterator[Callable[..., TpuVmFleet]]:
    fleets: list[TpuVmFleet] = []

    def make(error: str, start: float = FAULT_AT, length: float = FAULT_FOR) -> TpuVmFleet:
        fault = CallFault(
            error=error,
            method="ListNodes",
            after=timedelta(seconds=start),
            until=timedelta(seconds=start + length),
        )
        latencies = Latencies(boot=timedelta(seconds=BOOT), deletion=timedelta(seconds=10))
        fleets.append(TpuVmFleet(tmp_path, CloudFaultPlan(calls=(fault,), latencies=latencies)))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


@pytest.mark.parametrize("slices", [1, 2])
def test_a_job_runs_on_while_listings_lack_its_nodes(tpu_vm_fleet, slices):
    fleet = tpu_vm_fleet("omitted")
    job = fleet.run_job(slices=slices)
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"], fleet.event_log()
    assert fleet.nodes_made() == slices and fleet.nothing_is_paid()


def test_a_job_runs_on_if_the_first_listing_of_a_new_server_lacks_its_node(tpu_vm_fleet):
    fleet = tpu_vm_fleet("omitted")
    job = fleet.run_job()
    fleet.run(FAULT_AT + 20)
    fleet.tpus.restart()
    fleet.restart_controller()
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"], fleet.event_log()
    assert fleet.nodes_made() == 1 and fleet.nothing_is_paid()


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
def test_a_node_that_listings_lack_is_deleted_when_its_job_is_cancelled(tpu_vm_fleet, restarted):
    fleet = tpu_vm_fleet("omitted", length=3600)
    job = fleet.run_job()
    fleet.run(FAULT_AT + 10)
    if restarted:
        fleet.tpus.restart()
        fleet.restart_controller()
    fleet.cancel(job)
    fleet.until(lambda: fleet.job(job).ended and fleet.nothing_is_paid(), 120)
    fleet.until(lambda: fleet.tpus.listed() == 0, 60)
    assert not fleet.gang(job)


def test_a_node_that_is_ready_before_any_listing_has_it_is_used(tpu_vm_fleet):
    fleet = tpu_vm_fleet("omitted", start=0, length=300)
    job = fleet.run_job(steps=100)
    fleet.until(lambda: fleet.job(job).ended, 280)
    assert fleet.attempts(job) == ["finished"], fleet.event_log()
    fleet.until(fleet.nothing_is_paid, 60)
    assert fleet.nodes_made() == 1


@pytest.mark.parametrize("start", [0, 10, FAULT_AT, 440], ids="after {} s".format)
def test_stale_listings_neither_repeat_work_nor_leave_nodes(tpu_vm_fleet, start):
    fleet = tpu_vm_fleet("stale", start=start)
    job = fleet.run_job()
    fleet.settle(job)
    fleet.until(lambda: fleet.tpus.listed() == 0, 300)
    assert fleet.attempts(job) == ["finished"], fleet.event_log()
    assert fleet.nodes_made() == 1 and fleet.nothing_is_paid()


def test_a_preempted_node_that_stale_listings_show_as_ready_is_replaced(tpu_vm_fleet):
    fleet = tpu_vm_fleet("stale")
    job = fleet.run_job()
    fleet.run(FAULT_AT + 10)
    cloud = fleet.tpus.emulator.cloud
    with cloud.lock:
        [node] = cloud.nodes.values()
        cloud.reclaim(node, fleet.now())
    fleet.settle(job)
    assert fleet.attempts(job)[-1] == "finished" and len(fleet.attempts(job)) == 2
    assert fleet.job(job).state is JobState.SUCCEEDED and not fleet.failures(job)
    fleet.until(lambda: fleet.tpus.listed() == 0, 300)
    assert fleet.nothing_is_paid()


def test_an_orphan_is_reported_once_however_long_its_deletion_takes(tpu_vm_fleet, caplog):
    fleet = tpu_vm_fleet("stale", start=7200)
    cloud = fleet.tpus.emulator.cloud
    cloud.latencies = replace(cloud.latencies, deletion=timedelta(minutes=10))
    fleet.tpus.request(order("left-over"))
    for _ in range(BOOT + 60):  # without the invariants: this node is in no store
        fleet.clock.advance(SECOND)
        fleet.tpus.advance()
        fleet.controllers[0].tick()
    events = fleet.store.events(EventQuery(limit=1000))
    assert [event.state for event in events].count("orphan") == 1
    assert [record.levelname for record in caplog.records if "left-over" in record.message] == [
        "WARNING"
    ]
    assert fleet.nothing_is_paid()


def test_a_node_is_used_once_although_the_operation_of_its_creation_failed(tpu_vm_fleet):
    fleet = tpu_vm_fleet("stale", start=7200)
    job = fleet.run_job(steps=60)
    fleet.run(BOOT - 5)
    cloud = fleet.tpus.emulator.cloud
    with cloud.lock:
        [node] = cloud.nodes.values()
        cloud.operations.fail(node.creation, api_errors.api_error("internal"))
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"], fleet.event_log()
    assert fleet.nodes_made() == 1 and fleet.nothing_is_paid()


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
def test_a_deletion_of_ten_minutes_delays_no_recovery_and_is_not_paid(tpu_vm_fleet, restarted):
    fleet = tpu_vm_fleet("stale", start=7200)
    cloud = fleet.tpus.emulator.cloud
    cloud.latencies = replace(cloud.latencies, deletion=timedelta(minutes=10))
    job = fleet.run_job(steps=100)
    fleet.until(lambda: fleet.running(job))
    with cloud.lock:
        [node] = cloud.nodes.values()
        cloud.reclaim(node, fleet.now())
    if restarted:
        fleet.run(5)
        fleet.tpus.restart()
        fleet.restart_controller()
    fleet.until(lambda: fleet.running_attempt(job) == 1, BOOT + 30)
    fleet.until(lambda: fleet.job(job).ended and fleet.nothing_is_paid(), 300)
    assert fleet.tpus.listed() > 0, "it is still being deleted"
    fleet.until(lambda: fleet.tpus.listed() == 0, 900)
    assert fleet.nodes_made() == 2
