"""Elastic jobs on TPU VMs and on Compute Engine: the real providers with the emulated APIs."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="needs the extra `gcp`")

from tests.journeys.compute_cloud import ComputeCloud, minutes
from tests.journeys.simulated_hosts import Program
from tests.journeys.tpu_vm_cloud import TpuVmCloud
from tpufleet.providers.base import Fault
from tpufleet_testbed.cloud_tpu.capacity import CapacityLimit, CloudCapacity
from tpufleet_testbed.compute_engine.fault_plan import ComputeFaultPlan, StockLimit

ZONE = "europe-west4-a"
ELASTIC = {"accelerator": "v6e-8", "slices": {"min": 2, "max": 3}, "capacity": ["on-demand"]}


def sizes(fleet, job) -> list[int]:
    return [len(attempt.slices) for attempt in fleet.store.attempts(job)]


def test_on_tpu_vms_it_continues_without_a_lost_slice_and_grows_back(make_fleet):
    clouds = []

    def tpu_vms(clock):
        clouds.append(TpuVmCloud(clock, (ZONE,)))
        return clouds

    fleet = make_fleet(other_clouds=tpu_vms, boot_limit=timedelta(minutes=20))
    [cloud] = clouds
    job = fleet.submit(Program(steps=900), providers=["tpu-vm"], **ELASTIC)
    fleet.until(lambda: sizes(fleet, job) == [3])
    fleet.run(30)
    cloud.emulator.cloud.stock = CloudCapacity(nodes=(CapacityLimit(most=2),))
    cloud.inject(fleet.attempt(job).slices[0], Fault.PREEMPT)
    fleet.until(lambda: sizes(fleet, job) == [3, 2], 60)
    cloud.emulator.cloud.stock = CloudCapacity()
    fleet.until(lambda: sizes(fleet, job) == [3, 2, 3])
    fleet.settle(job, limit=7200)
    assert fleet.attempts(job) == ["preempted", "resized", "finished"]
    cloud.close()


def test_on_compute_engine_it_continues_without_a_lost_slice_and_grows_back(make_fleet, tmp_path):
    clouds = []

    def compute(clock):
        clouds.append(ComputeCloud(clock, tmp_path, (ZONE,), ComputeFaultPlan()))
        return clouds

    fleet = make_fleet(other_clouds=compute, boot_limit=minutes(20))
    [cloud] = clouds
    fleet.invariants.release_bound = minutes(3)
    job = fleet.submit(Program(steps=500), providers=["compute"], **ELASTIC)
    fleet.until(lambda: sizes(fleet, job) == [3], 600)
    fleet.run(30)
    cloud.engine.stock = (StockLimit(most=2),)
    cloud.stop(fleet.attempt(job).slices[0], "preempted")
    fleet.until(lambda: sizes(fleet, job) == [3, 2], 300)
    cloud.engine.stock = ()
    fleet.until(lambda: sizes(fleet, job) == [3, 2, 3], 1200)
    fleet.settle(job, limit=7200)
    assert fleet.attempts(job)[-1] == "finished"
    cloud.close()
