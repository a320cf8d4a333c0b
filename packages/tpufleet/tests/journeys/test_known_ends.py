"""Capacity whose end is known: reservations of calendar mode and flex-start, on Compute Engine and
as TPU VMs. A job is asked to save before its machines are deleted, and goes on elsewhere, or
waits."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="needs the extra `gcp`")

from tests.journeys.compute_cloud import ComputeCloud, minutes
from tests.journeys.simulated_hosts import Program
from tests.journeys.tpu_vm_cloud import TpuVmCloud
from tpufleet.model.job.jobs import Capacity, JobState
from tpufleet.service.jobs import explain
from tpufleet_testbed.cloud_tpu.fault_plan import CloudFaultPlan
from tpufleet_testbed.compute_engine.fault_plan import (
    IMMEDIATE,
    ComputeFaultPlan,
    ReservedCapacity,
)

ZONE = "us-east5-a"
GRACE = minutes(1)
WINDOW = minutes(20)
HELD = ReservedCapacity(name="held", zone=ZONE, machine="ct5p-hightpu-4t", vms=4, until=WINDOW)


@pytest.fixture(params=["compute", "tpu-vm"])
def clouds(request, make_fleet, tmp_path):
    """A fleet with one of the two clouds, a reservation of calendar mode in it, and flex-start."""
    made = []

    def make(**settings):
        def cloud(clock):
            quick = replace(IMMEDIATE, boot=timedelta(seconds=20), notice_period=minutes(0.5))
            plan = ComputeFaultPlan(latencies=quick, reservations=(HELD,))
            made.append(
                ComputeCloud(clock, tmp_path, (ZONE,), plan, **settings)
                if request.param == "compute"
                else TpuVmCloud(clock, (ZONE,), CloudFaultPlan(compute=plan), **settings)
            )
            return made

        return make_fleet(zones=(), other_clouds=cloud, boot_limit=minutes(20)), made[0]

    yield make
    for cloud in made:
        cloud.close()


def submit(fleet, cloud, *capacity, steps=1100):
    return fleet.submit(
        Program(steps=steps, checkpoint_every=1000), accelerator="v5p-8", grace="1m",
        providers=[cloud.name], capacity=list(capacity),
    )  # fmt: skip


def capacities(fleet, job):
    return [one.capacity for one in fleet.gang(job)]


def why(fleet, job):
    found = explain.explain(fleet.store, fleet.job(job), fleet.clock.now())
    return "\n".join([found.message, *found.details])


def test_a_job_saves_before_its_reservation_ends_and_goes_on_with_other_capacity(clouds):
    fleet, cloud = clouds(reservation="held")
    end = fleet.clock.now() + WINDOW
    job = submit(fleet, cloud, "reserved", "spot")
    fleet.until(lambda: fleet.running(job))
    assert capacities(fleet, job) == [Capacity.RESERVED]
    fleet.run(10)
    told = why(fleet, job)
    assert "its capacity ends in 19 min" in told and f"at {end:%Y-%m-%d %H:%M} UTC" in told

    fleet.until(lambda: fleet.job(job).state is JobState.RECOVERING, 3600)
    left = end - fleet.clock.now()
    assert GRACE < left <= GRACE + minutes(2), "the time that is left to save"
    fleet.until(lambda: capacities(fleet, job) == [Capacity.SPOT], 60)
    assert fleet.clock.now() < end, "it does not wait for the end"
    first = fleet.store.attempts(job)[0]
    assert first.message.endswith(f"its reservation ends at {end:%Y-%m-%d %H:%M} UTC")
    assert first.checkpoint_step == first.last_step, "nothing of its work is lost"

    fleet.settle(job, limit=3600)
    assert fleet.attempts(job) == ["preempted", "finished"] and fleet.failures(job) == 0
    assert not cloud.existing()


@pytest.mark.slow
def test_a_job_that_may_use_nothing_else_waits_and_says_for_what(clouds):
    fleet, cloud = clouds(reservation="held")
    end = fleet.clock.now() + WINDOW
    job = submit(fleet, cloud, "reserved")
    fleet.until(lambda: fleet.running(job))
    fleet.until(lambda: fleet.job(job).state is JobState.RECOVERING, 3600)
    fleet.until(lambda: not cloud.existing(), 300)
    assert f"reservation held ends at {end:%Y-%m-%d %H:%M} UTC" in why(fleet, job)
    fleet.until(lambda: fleet.clock.now() > end, 300)
    assert fleet.job(job).state is JobState.RECOVERING and not cloud.existing()
    assert fleet.attempts(job) == ["preempted"], "nothing was requested that would end at once"


@pytest.mark.slow
def test_a_job_saves_before_its_run_duration_ends_and_runs_again(clouds):
    fleet, cloud = clouds(max_run_duration=minutes(10))
    job = submit(fleet, cloud, "queued", steps=500)
    fleet.settle(job, limit=3600)
    assert fleet.attempts(job) == ["preempted", "finished"] and fleet.failures(job) == 0
    first = fleet.store.attempts(job)[0]
    assert "its run duration ends at" in first.message
    assert first.checkpoint_step == first.last_step
    assert first.last_step > 300, "nearly all of its time was used"
