"""The shipped roles are sufficient: each program works with its own service account."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from msgspec import structs
from msgspec.structs import replace

from tests.contract.test_providers import ZONE, order
from tests.k8s.rigs import eventually
from tpufleet.errors import PermissionMissing
from tpufleet.kubernetes.connections import EVENT, JOBSET, NAMESPACE, POD, SECRET, Connection
from tpufleet.model.fleet.cloud_slices import CloudState
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.providers.base import Fault
from tpufleet.providers.gke.provider import GkeProvider
from tpufleet.providers.gke.settings import GkeSettings
from tpufleet_testbed.kubernetes import components
from tpufleet_testbed.kubernetes.control_plane import KubernetesControlPlane

SHIPPED = Path(__file__).parents[2] / "deploy" / "k8s"
ROLES = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")


def shipped(plane: KubernetesControlPlane) -> list[dict]:
    return [
        manifest
        for folder in ("overlays/gke", "queues")
        for manifest in yaml.safe_load_all(plane.kubectl("kustomize", str(SHIPPED / folder)))
    ]


def account(plane: KubernetesControlPlane, name: str, home: str, folder: Path) -> Path:
    """A kubeconfig that authenticates as this service account."""
    token = plane.kubectl("create", "token", name, f"--namespace={home}").strip()
    written = components.kubeconfig(plane.layout)
    written["users"] = [{"name": "admin", "user": {"token": token}}]
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(written))
    return path


def apply(plane: KubernetesControlPlane, manifests: list[dict]) -> None:
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(manifests))


@pytest.mark.slow
def test_the_provisioner_creates_and_deletes_pools_with_the_shipped_role(rig, tmp_path):
    home = "tpu-provisioner-system"
    manifests = [
        manifest for manifest in shipped(rig.plane)
        if manifest["kind"] in ROLES and manifest["metadata"]["name"].startswith("tpu-provisioner")
    ]  # fmt: skip
    assert {manifest["kind"] for manifest in manifests} == set(ROLES)
    rig.connection.apply(NAMESPACE, {"metadata": {"name": home}})
    apply(rig.plane, manifests)
    kubeconfig = account(rig.plane, "tpu-provisioner-controller-manager", home, tmp_path)
    rig.provision(
        "--leader-elect", kubeconfig=kubeconfig, namespace=home,
        SERVE_KINDS="jobset,job", LEASE_DURATION="3s",
    )  # fmt: skip
    rig.submit("train", slices=2)
    eventually(lambda: rig.running("train", 8), 120, rig.describe)
    rig.end_pods("train")
    eventually(lambda: not rig.gke.pools, 60, rig.describe)
    assert {"NodePoolCreationStarted", "NodePoolCreationSucceeded"} <= rig.events()
    eventually(
        lambda: any(
            event["reason"] == "NodePoolDeletionStarted"
            for event in rig.connection.list(EVENT)[0]
        ),
        60, rig.describe,
    )  # fmt: skip
    assert "forbidden" not in rig.log()
    assert len(rig.gke.created) == 2


@pytest.fixture
def as_server(rig, tmp_path):
    """A connection with the role of the server, in the namespace of the test."""
    home = "tpufleet-system"
    rig.connection.apply(NAMESPACE, {"metadata": {"name": home}})
    manifests = []
    for manifest in shipped(rig.plane):
        if manifest["kind"] in ROLES and manifest["metadata"]["name"] == "tpufleet":
            metadata = dict(manifest["metadata"])
            if manifest["kind"] != "ServiceAccount":
                metadata["namespace"] = rig.namespace
            manifests.append({**manifest, "metadata": metadata})
    assert {manifest["kind"] for manifest in manifests} == {"ServiceAccount", "Role", "RoleBinding"}
    apply(rig.plane, manifests)
    connection = Connection(account(rig.plane, "tpufleet", home, tmp_path), timeout=900)
    yield connection
    connection.close()


@pytest.mark.slow
def test_the_server_runs_slices_with_the_shipped_role_and_nothing_more(rig, as_server):
    for name in ("a", "b"):
        rig.add_pool(f"{rig.namespace}-{name}", 4, "2x2x4", "tpu-v5p-slice", "ct5p-hightpu-4t")
    settings = GkeSettings(
        namespace=rig.namespace, image="registry/agent:1", cpu="1", memory="1Gi", zones=(ZONE,),
        queue="none-of-the-test",
    )  # fmt: skip
    # Lists Kueue workloads, of which there are none.
    queued = GkeProvider(as_server, settings, fleet="test", zones=(ZONE,))
    queued.request(replace(order("q"), capacity=Capacity.ON_DEMAND))
    assert [one.state for one in queued.listing()] == [CloudState.PENDING]
    queued.release(SliceId("q"), ZONE)

    provider = GkeProvider(
        as_server, structs.replace(settings, queue=""), fleet="test", zones=(ZONE,),
        notice_period=timedelta(minutes=5),
    )  # fmt: skip
    provider.start()
    try:
        asked = replace(order("a", "b"), job_id="j1", capacity=Capacity.ON_DEMAND)
        provider.request(asked)
        eventually(lambda: up(provider) == {"a", "b"}, 120, provider.listing)
        provider.advance()
        provider.inject(SliceId("a"), Fault.PREEMPT_NOTICE)
        provider.inject(SliceId("b"), Fault.KILL_HOST, 1)
        provider.inject(SliceId("a"), Fault.PREEMPT)
        provider.release(SliceId("a"), ZONE)
        provider.request(replace(order("c"), job_id="j1", capacity=Capacity.ON_DEMAND))
        eventually(lambda: "c" in up(provider), 120, provider.listing)
    finally:
        for one in provider.listing():
            provider.release(one.id, one.zone)
        provider.close()
    for kind in (JOBSET, POD, SECRET):
        eventually(lambda kind=kind: not rig.connection.list(kind, rig.namespace)[0], 60, kind)

    rig.connection.create(SECRET, {"metadata": {"name": "others", "namespace": rig.namespace}})
    for refused in (
        lambda: as_server.get(SECRET, "others", rig.namespace),
        lambda: as_server.list(SECRET, rig.namespace),
        lambda: as_server.list(POD, "kube-system"),
        lambda: as_server.list(JOBSET),
    ):
        with pytest.raises(PermissionMissing):
            refused()


def up(provider: GkeProvider) -> set[str]:
    return {one.id for one in provider.listing() if one.state is CloudState.UP}
