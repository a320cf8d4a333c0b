"""Configuration of a real node, and the error where none can run."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from click.testing import CliRunner

from tpufleet_testbed.cli.local_cluster import local_group
from tpufleet_testbed.kubernetes import cluster_layout
from tpufleet_testbed.kubernetes.binaries import Build
from tpufleet_testbed.kubernetes.control_plane import KubernetesControlPlane
from tpufleet_testbed.kubernetes.node import (
    bridge_network,
    job_namespace,
    node_config,
    real_node,
)
from tpufleet_testbed.kubernetes.node.bridge_network import BridgeNetwork
from tpufleet_testbed.kubernetes.node.node_config import NodeLayout, NodeShape


@pytest.fixture
def node(tmp_path):
    return NodeLayout(
        plane=cluster_layout.new_layout(tmp_path),
        name="n",
        ports=dict.fromkeys(node_config.PORTS, 4321),
        network=BridgeNetwork(bridge="tpu-x", subnet="10.88.7.0/24"),
        shape=NodeShape(),
    )


def test_a_node_listens_on_its_bridge_and_loopback_only(node, tmp_path):
    kubelet = node_config.kubelet_config(node)
    assert kubelet["address"] == "10.88.7.1" == kubelet["clusterDNS"][0]
    assert kubelet["healthzBindAddress"] == "127.0.0.1" and kubelet["readOnlyPort"] == 0
    assert kubelet["authentication"]["anonymous"] == {"enabled": False}
    assert "bind 10.88.7.1" in node_config.corefile(node)
    config = node_config.supervisor_config(node, Build(folder=tmp_path), tmp_path / "containerd")
    text = f"{config} {kubelet} {node_config.corefile(node)} {node_config.cni_file(node)}"
    assert "0.0.0.0" not in text


def test_a_node_has_the_labels_of_gke(node):
    labels = node_config.node_labels(node)
    assert labels["cloud.google.com/gke-tpu-accelerator"] == "tpu-v5-lite-podslice"
    assert labels["cloud.google.com/gke-tpu-topology"] == "4x4"
    assert labels["topology.kubernetes.io/region"] == "us-central1"


def test_jobs_wait_in_a_queue_with_the_one_slice_of_the_node(node, tmp_path):
    found = {each["kind"]: each for each in job_namespace.queue_manifests(node)}
    (group,) = found["ClusterQueue"]["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert flavor["name"] == found["ResourceFlavor"]["metadata"]["name"] == "v5litepod-16"
    assert flavor["resources"][0] == {"name": "google.com/tpu", "nominalQuota": 16}
    assert (
        found["ResourceFlavor"]["spec"]["nodeLabels"].items()
        <= node_config.node_labels(node).items()
    )
    queue = found["LocalQueue"]["metadata"]
    node.folder.mkdir(parents=True)
    (node.folder / "image").touch()
    plane = KubernetesControlPlane(layout=node.plane, build=Build(folder=tmp_path))
    settings = job_namespace.server_settings(plane, node)
    assert settings["TPUFLEET_GKE_QUEUE"] == queue["name"]
    assert settings["TPUFLEET_GKE_NAMESPACE"] == queue["namespace"]


def test_folders_with_fixed_paths_are_bind_mounted_from_the_node_folder(node, tmp_path):
    config = node_config.supervisor_config(node, Build(folder=tmp_path), tmp_path / "containerd")
    mounts = config.bind_mounts
    assert {"/run/containerd", "/var/lib/kubelet", "/var/lib/cni"} <= set(mounts)
    assert all(source.startswith(str(node.folder)) for source in mounts.values())
    assert len(set(mounts.values())) == len(mounts)


@pytest.mark.skipif(shutil.which("ip") is None, reason="ip not found; apt-get install iproute2")
def test_each_cluster_has_its_own_bridge_and_subnet(tmp_path):
    first = bridge_network.allocate(tmp_path / "one")
    second = bridge_network.allocate(tmp_path / "two")
    assert first.bridge != second.bridge and len(first.bridge) <= 15
    assert first.gateway.endswith(".1")
    assert bridge_network.allocate(tmp_path / "one") == first


@pytest.fixture
def machine(tmp_path):
    """A PATH and a CNI folder with everything that a real node needs, as empty files."""
    programs, plugins = tmp_path / "bin", tmp_path / "cni"
    programs.mkdir()
    plugins.mkdir()
    for path in (*(programs / name for name in real_node.PACKAGES), plugins / "bridge"):
        path.touch(mode=0o755)
    return programs, plugins


@pytest.mark.parametrize(
    ("program", "package"),
    [("containerd", "containerd"), ("ctr", "containerd"), ("runc", "runc"), ("ip", "iproute2")],
)
def test_a_missing_program_is_reported_as_its_package(machine, program, package):
    programs, plugins = machine
    assert real_node.missing_packages(str(programs), [plugins]) == set()
    (programs / program).unlink()
    assert real_node.missing_packages(str(programs), [plugins]) == {package}


def test_missing_cni_plugins_are_reported_as_their_package(machine, tmp_path):
    programs, _ = machine
    assert real_node.missing_packages(str(programs), [tmp_path / "none"]) == {
        "containernetworking-plugins"
    }


@pytest.mark.skipif(sys.platform != "linux", reason="real nodes require Linux")
def test_all_missing_packages_are_in_one_command(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = real_node.unsupported_reason()
    assert "apt-get install containerd" in reason and reason.endswith("iproute2 runc`")


@pytest.mark.skipif(sys.platform != "linux", reason="real nodes require Linux")
def test_without_root_the_error_comes_before_anything_is_started(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = CliRunner().invoke(local_group, ["up", "--node"])
    assert isinstance(result.exception, real_node.RealNodeUnsupported)
    assert "sudo" in str(result.exception)
