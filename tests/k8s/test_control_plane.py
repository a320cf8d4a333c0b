"""The control plane: runs JobSets on KWOK nodes, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import yaml

from tests.k8s.rigs import eventually
from tpufleet.errors import Conflict, NotFound
from tpufleet.kubernetes.connections import JOBSET
from tpufleet_testbed.kubernetes import binaries, cluster

ROOT = Path(__file__).parents[2]


def test_a_jobset_of_two_slices_runs_on_kwok_nodes(rig):
    rig.add_pool("cp-a")
    rig.add_pool("cp-b")
    rig.submit("two", slices=2)
    eventually(lambda: rig.running("two", 8), 120, rig.describe)
    pools = {pod["spec"]["nodeName"].rpartition("-")[0] for pod in rig.pods("two")}
    assert pools == {"gke-cp-a", "gke-cp-b"}
    rig.end_pods("two")
    eventually(lambda: rig.condition("two", "Completed"), 60, rig.describe)


def test_a_failed_pod_restarts_its_jobset(rig):
    rig.add_pool("cp-c")
    rig.submit("fails")
    eventually(lambda: rig.running("fails", 4), 120, rig.describe)
    before = {pod["metadata"]["uid"] for pod in rig.pods("fails")}
    rig.end_pods("fails", code=42)
    eventually(
        lambda: rig.running("fails", 4)
        and not before & {pod["metadata"]["uid"] for pod in rig.pods("fails")},
        120, rig.describe,
    )  # fmt: skip


def test_pods_that_request_chips_tolerate_the_taint_of_tpu_nodes(rig):
    """As on GKE, so that manifests of users need no toleration."""
    example = next(yaml.safe_load_all((ROOT / "examples/jobset/jobset.yaml").read_text()))
    assert "google.com/tpu" not in str(
        example["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["tolerations"]
    )
    example["metadata"]["namespace"] = rig.namespace
    rig.connection.create(JOBSET, example)
    [pod, *_] = eventually(lambda: rig.pods("example"), 60, rig.describe)
    tolerations = {each.get("key") for each in pod["spec"]["tolerations"]}
    assert {"google.com/tpu", "cloud.google.com/gke-spot"} <= tolerations


@pytest.mark.scale  # the session fixture covers the rest
def test_a_second_control_plane_starts_and_stops_without_leftovers(plane, tmp_path):
    folder = tmp_path / "second"
    second = cluster.up(folder)
    try:
        statuses = cluster.status(folder)
        assert {status.name for status in statuses} == {
            "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kueue",
            "jobset", "kwok",
        }  # fmt: skip
        assert all(status.alive for status in statuses)
        assert set(second.layout.ports.values()).isdisjoint(plane.layout.ports.values())
        assert "kueue-system" in second.kubectl("get", "namespaces", "-o", "name")
        with pytest.raises(Conflict, match="down"):
            cluster.up(folder)
    finally:
        assert cluster.down(folder) is True
    assert not any(psutil.pid_exists(status.pid) for status in statuses)
    assert not folder.exists()
    assert cluster.down(folder) is False
    with pytest.raises(NotFound, match="up"):
        cluster.find(folder)


def test_the_cached_build_is_found_by_its_sources(plane):
    assert binaries.find_cached().folder == plane.build.folder
