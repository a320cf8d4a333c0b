"""Elastic jobs on TPU VMs: the real provider with the emulated API."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="needs the extra `gcp`")

from tests.journeys.simulated_hosts import Program
from tests.journeys.tpu_vm_cloud import TpuVmCloud
from tpufleet.providers.base import Fault
from tpufleet_testbed.cloud_tpu.capacity import CapacityLimit, CloudCapacity

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
