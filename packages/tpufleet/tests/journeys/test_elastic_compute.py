"""Elastic jobs on Compute Engine: the real provider with the emulated API."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

pytest.importorskip("google.auth", reason="pip install 'tpufleet[compute]'")

from tests.journeys.compute_cloud import ComputeCloud, minutes
from tests.journeys.simulated_hosts import Program
from tpufleet_testbed.compute_engine.fault_plan import IMMEDIATE, ComputeFaultPlan, StockLimit

ZONE = "us-east5-a"
ELASTIC = {"slices": {"min": 2, "max": 3}, "providers": ["compute"]}


def sizes(fleet, job) -> list[int]:
    return [len(attempt.slices) for attempt in fleet.store.attempts(job)]


@pytest.mark.parametrize(
    ("accelerator", "hosts", "capacity"), [("v6e-8", 1, "spot"), ("v6e-16", 4, "queued")],
    ids=["instances", "groups in the queue"],
)  # fmt: skip
def test_on_instances_it_continues_without_a_lost_slice_and_grows_back(
    make_fleet, tmp_path, accelerator, hosts, capacity
):
    """Also in the queue of flex-start, where a request waits as long as there is no capacity."""
    plan = ComputeFaultPlan(latencies=replace(IMMEDIATE, boot=timedelta(seconds=20)))
    clouds: list[ComputeCloud] = []

    def compute(clock):
        clouds.append(ComputeCloud(clock, tmp_path, (ZONE,), plan))
        return clouds

    fleet = make_fleet(other_clouds=compute, boot_limit=minutes(20))
    [cloud] = clouds
    job = fleet.submit(Program(steps=300), accelerator=accelerator, capacity=[capacity], **ELASTIC)
    fleet.until(lambda: sizes(fleet, job) == [3], 600)
    fleet.run(30)
    cloud.engine.stock = (StockLimit(most=2 * hosts),)
    cloud.stop(fleet.attempt(job).slices[0], "preempted" if capacity == "spot" else "expired")
    fleet.until(lambda: sizes(fleet, job) == [3, 2], 120)
    cloud.engine.stock = ()
    fleet.until(lambda: sizes(fleet, job) == [3, 2, 3], 1200)
    fleet.settle(job, limit=7200)
    assert fleet.attempts(job) == ["preempted", "resized", "finished"]
    assert not cloud.existing() and not cloud.engine.groups
    cloud.close()
