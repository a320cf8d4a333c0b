"""The control plane itself: what runs on it, and that nothing of it stays behind."""

from __future__ import annotations

import psutil
import pytest

from tests.k8s.rigs import eventually
from tpufleet.errors import Conflict, NotFound
from tpufleet.testbed.kubernetes import binaries, cluster

pytestmark = pytest.mark.timeout(600)


def test_a_jobset_of_two_slices_runs_on_nodes_that_kwok_plays(rig):
    rig.add_pool("cp-a")
    rig.add_pool("cp-b")
    rig.submit("two", slices=2)
    eventually(lambda: rig.running("two", 8), 120, rig.told)
    pools = {pod["spec"]["nodeName"].rpartition("-")[0] for pod in rig.pods("two")}
    assert pools == {"gke-cp-a", "gke-cp-b"}
    rig.end_pods("two")
    eventually(lambda: rig.condition("two", "Completed"), 60, rig.told)


def test_a_pod_that_fails_restarts_its_jobset(rig):
    rig.add_pool("cp-c")
    rig.submit("fails")
    eventually(lambda: rig.running("fails", 4), 120, rig.told)
    before = {pod["metadata"]["uid"] for pod in rig.pods("fails")}
    rig.end_pods("fails", code=42)
    eventually(
        lambda: rig.running("fails", 4)
        and not before & {pod["metadata"]["uid"] for pod in rig.pods("fails")},
        120, rig.told,
    )  # fmt: skip


@pytest.mark.scale  # by default each worker has one, beside the others', and looks after it
def test_one_that_starts_beside_another_stops_without_leftovers(plane, tmp_path):
    folder = tmp_path / "second"
    second = cluster.up(folder)
    try:
        parts = cluster.status(folder)
        assert {part.name for part in parts} == {
            "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kueue",
            "jobset", "kwok",
        }  # fmt: skip
        assert all(part.alive for part in parts)
        assert set(second.layout.ports.values()).isdisjoint(plane.layout.ports.values())
        assert "kueue-system" in second.kubectl("get", "namespaces", "-o", "name")
        with pytest.raises(Conflict, match="down"):
            cluster.up(folder)
    finally:
        assert cluster.down(folder) is True
    assert not any(psutil.pid_exists(part.pid) for part in parts)
    assert not folder.exists()
    assert cluster.down(folder) is False
    with pytest.raises(NotFound, match="up"):
        cluster.find(folder)


def test_the_build_is_found_again_by_its_sources(plane):
    assert binaries.find_cached().folder == plane.build.folder
