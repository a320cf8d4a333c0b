"""One job file for Compute Engine, TPU VMs and GKE: what is used when one runs out, and that
`tpu why` tells each step."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")
pytest.importorskip("lightkube", reason="needs the extra `k8s`: pip install 'tpufleet[k8s]'")
pytest.importorskip("google.cloud.tpu_v2", reason="needs the extra `gcp`")

from tests.journeys.compute_cloud import ComputeCloud, minutes
from tests.journeys.gke_cloud import GkeCloud
from tests.journeys.simulated_hosts import Program
from tests.journeys.tpu_vm_cloud import TpuVmCloud
from tpufleet.model.api_types import SourceState
from tpufleet.model.fleet.pools import RefusalKind
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import Capacity, JobState
from tpufleet.service.jobs import explain
from tpufleet_testbed.cloud_tpu.capacity import CapacityLimit, CloudCapacity
from tpufleet_testbed.compute_engine.fault_plan import (
    IMMEDIATE,
    ComputeFaultPlan,
    QuotaLimit,
    ReservedCapacity,
    StockLimit,
    Switches,
)

FIRST, SECOND = "us-east5-a", "us-central1-b"
VM_ZONE, GKE_ZONE = "europe-west4-a", "us-central1-a"
SPOT, QUEUED = Capacity.SPOT, Capacity.QUEUED
REFUSED, REQUESTED = SourceState.REFUSED, SourceState.REQUESTED
JOB = {
    "accelerator": "v6e-8", "providers": ["compute", "tpu-vm", "gke"],
    "capacity": ["spot", "queued"],
}  # fmt: skip


@pytest.fixture
def clouds(make_fleet, tmp_path):
    """A fleet with three clouds. Compute Engine has spot capacity in the first zone only; for TPU
    VMs there is no quota, and on GKE no capacity yet."""
    plan = ComputeFaultPlan(
        latencies=replace(IMMEDIATE, boot=timedelta(seconds=20), notice_period=minutes(0.5)),
        stock=(StockLimit(most=0, zone=SECOND, model="SPOT"),),
    )
    made = []

    def make(clock):
        made.append(ComputeCloud(clock, tmp_path, (FIRST, SECOND), plan))
        made.append(TpuVmCloud(clock, (VM_ZONE,)))
        made.append(GkeCloud(clock, (GKE_ZONE,)))
        made[1].emulator.cloud.stock = CloudCapacity(quota=(CapacityLimit(most=0),))
        made[2].gke.stock[(GKE_ZONE, "ct6e-standard-8t")] = 0
        return made

    yield make_fleet(zones=(), other_clouds=make, boot_limit=minutes(20)), *made
    for cloud in made:
        cloud.close()


@pytest.fixture
def instances(make_fleet, tmp_path):
    """A fleet with Compute Engine only."""
    made = []

    def make(settings=None, **plan):
        def cloud(clock):
            faults = ComputeFaultPlan(latencies=replace(IMMEDIATE, reservation=minutes(1)), **plan)
            made.append(ComputeCloud(clock, tmp_path, (FIRST,), faults, **settings or {}))
            return made

        return make_fleet(zones=(), other_clouds=cloud, boot_limit=minutes(20)), made[0]

    yield make
    for cloud in made:
        cloud.close()


def placed(fleet, job):
    return [(one.provider, one.zone, one.capacity) for one in fleet.gang(job)]


def why(fleet, job):
    """What `tpu why` shows: the job's attempts, and what each source answered."""
    found = explain.explain(fleet.store, fleet.job(job), fleet.clock.now())
    sources = {(one.provider, one.zone, one.capacity): one.state for one in found.sources}
    return [attempt.end_reason for attempt in found.attempts], sources


def refusals(fleet):
    return {
        (one.provider, one.zone, one.capacity): one.kind
        for one in fleet.store.refusals()
        if one.streak
    }


def test_a_job_falls_from_spot_to_flex_start_in_another_zone_and_then_to_gke(clouds):
    fleet, compute, _, gke = clouds
    job = fleet.submit(Program(steps=300, checkpoint_every=30), **JOB)
    fleet.until(lambda: fleet.running(job))
    assert placed(fleet, job) == [("compute", FIRST, SPOT)]

    # Its zone runs out of spot capacity, which takes its VM, and its region of quota: flex-start
    # would wait there for ever.
    compute.engine.stock = (StockLimit(most=0, model="SPOT"),)
    compute.engine.quota = (QuotaLimit(most=0, region="us-east5"),)
    [tpu_slice] = fleet.gang(job)
    compute.stop(tpu_slice.id, "preempted")
    fleet.until(lambda: placed(fleet, job) == [("compute", SECOND, QUEUED)])
    ended, sources = why(fleet, job)
    assert ended == [EndReason.PREEMPTED]
    assert sources == {
        ("compute", FIRST, SPOT): REFUSED, ("compute", SECOND, SPOT): REFUSED,
        ("tpu-vm", VM_ZONE, SPOT): REFUSED, ("gke", GKE_ZONE, SPOT): REFUSED,
        ("compute", FIRST, QUEUED): REFUSED, ("compute", SECOND, QUEUED): REQUESTED,
        ("tpu-vm", VM_ZONE, QUEUED): SourceState.UNTRIED,
        ("gke", GKE_ZONE, QUEUED): SourceState.UNTRIED,
    }  # fmt: skip
    assert refusals(fleet) == {
        ("compute", FIRST, SPOT): RefusalKind.QUOTA,
        ("compute", SECOND, SPOT): RefusalKind.CAPACITY,
        ("tpu-vm", VM_ZONE, SPOT): RefusalKind.QUOTA,
        ("gke", GKE_ZONE, SPOT): RefusalKind.CAPACITY,
        ("compute", FIRST, QUEUED): RefusalKind.QUOTA,
    }

    # Google deletes the VM at the end of its run duration, and has no more; GKE has now.
    fleet.until(lambda: fleet.running(job))
    fleet.run(60)
    compute.engine.quota = (QuotaLimit(most=0),)
    gke.gke.stock.clear()
    [tpu_slice] = fleet.gang(job)
    compute.stop(tpu_slice.id, "expired")
    fleet.until(lambda: [one.provider for one in fleet.gang(job)] == ["gke"], 1200)
    assert why(fleet, job)[0] == [EndReason.PREEMPTED, EndReason.PREEMPTED]
    fleet.settle(job, limit=7200)
    assert fleet.job(job).state is JobState.SUCCEEDED
    assert fleet.attempts(job) == ["preempted", "preempted", "finished"]
    assert fleet.failures(job) == 0
    assert max(fleet.disk.steps.values()) == 300
    assert not compute.existing() and not compute.engine.groups


def test_a_job_in_a_reservation_of_calendar_mode_starts_as_soon_as_google_has_made_it(instances):
    """However long it has waited, and although that is after the start."""
    held = ReservedCapacity(
        name="held", zone=FIRST, machine="ct6e-standard-8t", vms=1, after=minutes(9),
        until=timedelta(days=2),
    )  # fmt: skip
    fleet, compute = instances({"reservation": "held"}, reservations=(held,))
    begin = fleet.clock.now() + minutes(9)
    fields = {"accelerator": "v6e-8", "providers": ["compute"], "capacity": ["reserved"]}
    job = fleet.submit(Program(steps=10), **fields)
    fleet.until(compute.existing)
    assert minutes(1) <= fleet.clock.now() - begin <= minutes(2)
    fleet.until(lambda: fleet.running(job))


def test_a_zone_that_refuses_spot_groups_gives_flex_start_and_says_why(instances):
    fleet, _ = instances(switches=Switches(bulk_models=("FLEX_START",)))
    fields = {"accelerator": "v6e-16", "providers": ["compute"]}
    job = fleet.submit(Program(steps=10), **fields, capacity=["spot", "queued"])
    only = fleet.submit(Program(steps=10), **fields, capacity=["spot"])
    fleet.until(lambda: placed(fleet, job) == [("compute", FIRST, QUEUED)])
    fleet.until_state(only, JobState.FAILED)
    assert "does not support SPOT" in fleet.job(only).reason
