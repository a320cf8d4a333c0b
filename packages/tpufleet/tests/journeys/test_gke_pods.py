"""The pods of a job on GKE are as its job file, or its pool, describes them."""

from __future__ import annotations

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")
pytest.importorskip("lightkube", reason="needs the extra `k8s`: pip install 'tpufleet[k8s]'")

from tests.journeys.test_gke_capacity import A, gke_fleet  # noqa: F401  (a fixture)
from tests.kubernetes.fake_api_server import FakeConnection
from tpufleet.errors import BadInput
from tpufleet.kubernetes.connections import POD
from tpufleet.model.job.jobs import JobState
from tpufleet.model.job.pod_settings import PodSettings

TYPE = "v6e-8"


def pod_of(fleet, cloud, job):
    fleet.until(lambda: fleet.gang(job), 60)
    connection = FakeConnection(cloud.server)
    fleet.until(lambda: connection.list(POD)[0], 60)
    [pod] = connection.list(POD)[0]
    return pod


def test_a_job_chooses_image_and_account_of_its_pods(gke_fleet):  # noqa: F811
    fleet, cloud = gke_fleet
    job = fleet.submit(
        accelerator=TYPE, providers=["gke"], zones=[A], capacity=["on-demand"],
        pod={"image": "registry/train:7", "service_account": "trainer", "cpu": 24},
    )  # fmt: skip
    spec = pod_of(fleet, cloud, job)["spec"]
    assert spec["serviceAccountName"] == "trainer"
    [container] = spec["containers"]
    assert (container["image"], container["resources"]["limits"]["cpu"]) == (
        "registry/train:7",
        "24",
    )
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED


def test_a_pool_chooses_the_account_of_its_pods(gke_fleet):  # noqa: F811
    fleet, cloud = gke_fleet
    fleet.put_pool(
        name="lab", provider="gke", accelerator=TYPE, largest=1, zones=(A,),
        pod=PodSettings(service_account="lab-account"),
    )  # fmt: skip
    job = fleet.submit(accelerator=TYPE, pool="lab")
    assert pod_of(fleet, cloud, job)["spec"]["serviceAccountName"] == "lab-account"


def test_a_pool_replaces_its_idle_pods_when_their_settings_change(gke_fleet):  # noqa: F811
    fleet, cloud = gke_fleet
    pool = {"name": "lab", "provider": "gke", "accelerator": TYPE, "zones": (A,)}
    connection = FakeConnection(cloud.server)

    def images() -> set[str]:
        containers = [pod["spec"]["containers"][0] for pod in connection.list(POD)[0]]
        return {container["image"] for container in containers}

    for image in ("registry/jax:1", "registry/jax:2"):
        fleet.put_pool(**pool, smallest=1, largest=1, pod=PodSettings(image=image))
        fleet.until(lambda image=image: images() == {image}, 300)
    assert len(fleet.store.slices(pool="lab")) == 1


def test_invalid_pods_of_a_pool_are_rejected(gke_fleet):  # noqa: F811
    fleet, _ = gke_fleet
    with pytest.raises(BadInput, match=r"pod\.cpu: 'many' is not an amount"):
        fleet.put_pool(
            name="lab", provider="gke", accelerator=TYPE, largest=1, pod=PodSettings(cpu="many")
        )
