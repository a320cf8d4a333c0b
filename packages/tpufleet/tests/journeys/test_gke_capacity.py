"""Running out of capacity on GKE: the next zone, the next kind of capacity, the next provider."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")
pytest.importorskip("lightkube", reason="needs the extra `k8s`: pip install 'tpufleet[k8s]'")

pytest.importorskip("google.cloud.tpu_v2", reason="needs the extra `gcp`")

from tests.journeys.gke_cloud import GkeCloud
from tests.journeys.tpu_vm_cloud import TpuVmCloud
from tpufleet.model.job.jobs import Capacity, JobState
from tpufleet.service.jobs import explain

A, B = "us-central1-a", "us-central1-b"
VM_ZONE = "europe-west4-a"
MACHINE = "ct6e-standard-8t"
TYPE = "v6e-8"
LABEL = "tpu-v6e-slice"


@pytest.fixture
def gke_fleet(make_fleet):
    """A fleet on GKE with zones A and B, and the provider `fake` after it."""
    clouds = []

    def gke(clock):
        clouds.append(GkeCloud(clock, (A, B)))
        return clouds

    fleet = make_fleet(
        zones=("europe-west4-b",), other_clouds=gke, boot_limit=timedelta(minutes=20)
    )
    yield fleet, clouds[0]
    clouds[0].close()


def placed(fleet, job):
    return [(one.provider, one.zone, one.capacity) for one in fleet.gang(job)]


def test_a_job_moves_to_the_next_zone_within_a_minute(gke_fleet):
    fleet, cloud = gke_fleet
    cloud.gke.stock[(A, MACHINE)] = 0
    job = fleet.submit(accelerator=TYPE, providers=["gke"], zones=[A, B], capacity=["on-demand"])
    fleet.until(lambda: placed(fleet, job) == [("gke", B, Capacity.ON_DEMAND)], 60)
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED
    fleet.run(60)
    assert cloud.provisioner.states() == {}


def test_a_later_job_avoids_the_zone_that_was_out_of_stock(gke_fleet):
    fleet, cloud = gke_fleet
    cloud.gke.stock[(A, MACHINE)] = 0
    first = fleet.submit(accelerator=TYPE, providers=["gke"], zones=[A, B], capacity=["on-demand"])
    fleet.until(lambda: placed(fleet, first) == [("gke", B, Capacity.ON_DEMAND)], 60)
    second = fleet.submit(accelerator=TYPE, providers=["gke"], zones=[A, B], capacity=["on-demand"])
    fleet.until(lambda: placed(fleet, second) == [("gke", B, Capacity.ON_DEMAND)], 5)


def test_on_demand_is_used_when_spot_is_out_of_stock_in_all_zones(gke_fleet):
    fleet, cloud = gke_fleet
    cloud.gke.stock |= {(A, MACHINE, "spot"): 0, (B, MACHINE, "spot"): 0}
    job = fleet.submit(accelerator=TYPE, providers=["gke"], capacity=["spot", "on-demand"])
    fleet.until(lambda: placed(fleet, job) == [("gke", A, Capacity.ON_DEMAND)], 120)
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED


def test_another_provider_is_used_when_gke_is_out_of_stock(gke_fleet):
    fleet, cloud = gke_fleet
    cloud.gke.stock |= {(A, MACHINE): 0, (B, MACHINE): 0}
    job = fleet.submit(accelerator=TYPE, providers=["gke", "fake"], capacity=["on-demand"])
    fleet.until(lambda: [one.provider for one in fleet.gang(job)] == ["fake"], 120)
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED


def test_gke_is_used_when_another_provider_is_out_of_stock(gke_fleet):
    fleet, _ = gke_fleet
    fleet.cloud.stock[("europe-west4-b", TYPE)] = 0
    job = fleet.submit(accelerator=TYPE, providers=["fake", "gke"], capacity=["on-demand"])
    fleet.until(lambda: placed(fleet, job) == [("gke", A, Capacity.ON_DEMAND)], 30)
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED


def test_while_everything_is_out_of_stock_the_reason_names_it(gke_fleet):
    fleet, cloud = gke_fleet
    cloud.gke.stock |= {(A, MACHINE): 0, (B, MACHINE): 0}
    job = fleet.submit(accelerator=TYPE, providers=["gke"])
    fleet.until(lambda: "GCE_STOCKOUT" in fleet.job(job).reason, 180)
    fleet.run(600)
    assert len(cloud.gke.created) < 14  # each wait is longer than the last
    cloud.gke.stock.clear()
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED


@pytest.mark.slow
def test_a_missing_permission_is_named_as_such_and_retried_without_haste(gke_fleet):
    fleet, cloud = gke_fleet
    text = 'Required "container.clusters.update" permission(s) for "projects/p". ' + "More. " * 99
    cloud.gke.fail_next_call("create", "PERMISSION_DENIED", text, times=10_000)
    job = fleet.submit(accelerator=TYPE, providers=["gke"], zones=[A, B], capacity=["on-demand"])
    fleet.run(600)
    assert cloud.gke.calls.count("create") < 40
    explanation = explain.explain(fleet.store, fleet.job(job), fleet.clock.now())
    refusals = [line for line in explanation.details if line.startswith("no access for v6e-8")]
    assert len(refusals) == 2
    assert "lacks container.clusters.update; " in refusals[0]
    assert "More." not in str(explanation.details)
    assert [source.detail for source in explanation.sources] == [text, text]
    cloud.gke.stop_failing()
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED


def test_a_quota_is_named_as_such(gke_fleet):
    fleet, cloud = gke_fleet
    cloud.gke.quotas |= {("us-central1", LABEL): 4}
    job = fleet.submit(accelerator=TYPE, providers=["gke"], zones=[A, B], capacity=["on-demand"])
    fleet.run(120)
    explanation = explain.explain(fleet.store, fleet.job(job), fleet.clock.now())
    (first, *_) = [line for line in explanation.details if line.startswith("no quota for v6e-8")]
    assert "TPUS_PER_TPU_FAMILY: 8 needed, 4 of 4 left" in first


@pytest.mark.slow
def test_nodes_that_never_come_end_at_the_boot_limit(gke_fleet):
    """The pods stay unschedulable, and nobody says why: no provisioner runs."""
    fleet, cloud = gke_fleet
    cloud.provisions = False
    job = fleet.submit(accelerator=TYPE, providers=["gke"], zones=[A, B], capacity=["on-demand"])
    fleet.until(lambda: [one.zone for one in fleet.gang(job)] == [B], 21 * 60)


def test_a_late_device_plugin_delays_a_job_and_buys_nothing(gke_fleet):
    fleet, cloud = gke_fleet
    cloud.gke.device_plugin_delay = timedelta(minutes=2)
    job = fleet.submit(accelerator=TYPE, providers=["gke"])
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED
    assert len(cloud.gke.created) == 1


@pytest.mark.slow
def test_a_gang_moves_together(gke_fleet):
    fleet, cloud = gke_fleet
    cloud.gke.stock[(A, MACHINE)] = 0
    job = fleet.submit(
        accelerator=TYPE, slices=2, providers=["gke"], zones=[A, B], capacity=["on-demand"]
    )
    fleet.until(lambda: [one.zone for one in fleet.gang(job)] == [B, B], 90)
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED


@pytest.fixture
def two_clouds(make_fleet):
    """A fleet on GKE and on TPU VMs, both with their real provider and an emulated API."""
    clouds = []

    def both(clock):
        clouds.extend([GkeCloud(clock, (A, B)), TpuVmCloud(clock, (VM_ZONE,))])
        return clouds

    yield make_fleet(other_clouds=both, boot_limit=timedelta(minutes=20)), *clouds
    for cloud in clouds:
        cloud.close()


# One job file for every journey below.
ONE_FILE = {
    "accelerator": TYPE,
    "providers": ["gke", "tpu-vm"],
    "capacity": ["spot", "on-demand"],
}


def test_one_job_file_moves_from_gke_to_tpu_vms_when_gke_is_out_of_stock(two_clouds):
    fleet, gke, _ = two_clouds
    gke.gke.stock |= {(A, MACHINE): 0, (B, MACHINE): 0}
    job = fleet.submit(**ONE_FILE)
    fleet.until(lambda: placed(fleet, job) == [("tpu-vm", VM_ZONE, Capacity.SPOT)], 240)
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED
    fleet.run(120)
    assert gke.provisioner.states() == {} and fleet.existing() == []


def test_one_job_file_moves_back_to_gke_when_tpu_vms_are_out_of_stock(two_clouds):
    fleet, _, vms = two_clouds
    vms.sell_out()
    job = fleet.submit(**{**ONE_FILE, "providers": ["tpu-vm", "gke"]})
    fleet.until(lambda: placed(fleet, job) == [("gke", A, Capacity.SPOT)], 120)
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED


@pytest.mark.slow
def test_one_job_file_uses_on_demand_on_gke_when_no_provider_has_spot(two_clouds):
    fleet, gke, vms = two_clouds
    vms.sell_out()
    gke.gke.stock |= {(A, MACHINE, "spot"): 0, (B, MACHINE, "spot"): 0}
    job = fleet.submit(**ONE_FILE)
    fleet.until(lambda: placed(fleet, job) == [("gke", A, Capacity.ON_DEMAND)], 240)
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED
