"""Elastic jobs on GKE: the real provider, with the emulated GKE API and a simulated JobSet."""

from __future__ import annotations

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")
pytest.importorskip("lightkube", reason="needs the extra `k8s`: pip install 'tpufleet[k8s]'")

from tests.journeys.simulated_hosts import Program
from tests.journeys.test_gke_capacity import MACHINE, TYPE, A, gke_fleet  # noqa: F401
from tests.kubernetes.fake_api_server import FakeConnection
from tpufleet.kubernetes.connections import JOBSET
from tpufleet.providers.base import Fault

ELASTIC = {"accelerator": TYPE, "slices": {"min": 2, "max": 3}, "capacity": ["on-demand"]}


def sizes(fleet, job) -> list[int]:
    return [len(attempt.slices) for attempt in fleet.store.attempts(job)]


def test_on_gke_the_slices_that_it_needs_are_one_jobset_and_each_further_one_its_own(
    gke_fleet,  # noqa: F811
):
    fleet, cloud = gke_fleet
    cloud.gke.stock[(A, MACHINE)] = 2
    job = fleet.submit(Program(steps=1500), providers=["gke"], zones=[A], **ELASTIC)
    fleet.until(lambda: sizes(fleet, job) == [2])
    cloud.gke.stock.clear()
    fleet.until(lambda: sizes(fleet, job) == [2, 3], 1200)
    jobsets = FakeConnection(cloud.server).list(JOBSET)[0]
    replicas = [each["spec"]["replicatedJobs"][0]["replicas"] for each in jobsets]
    assert sorted(replicas) == [1, 2]
    cloud.inject(fleet.attempt(job).slices[0], Fault.PREEMPT)
    fleet.settle(job, limit=7200)
    assert fleet.attempts(job) == ["resized", "preempted", "resized", "finished"]
