"""A real node's settings, and what is said where there can be none."""

from __future__ import annotations

import shutil

import pytest

from tests.testbed.kubernetes.test_binaries import Build
from tpufleet.testbed.kubernetes import cluster_layout, commands
from tpufleet.testbed.kubernetes.node import bridge_network, node_config, real_node
from tpufleet.testbed.kubernetes.node.bridge_network import BridgeNetwork
from tpufleet.testbed.kubernetes.node.node_config import NodeLayout, NodeShape


@pytest.fixture
def node(tmp_path):
    return NodeLayout(
        plane=cluster_layout.new_layout(tmp_path), name="n", ports=dict.fromkeys(node_config.PORTS, 4321),
        network=BridgeNetwork(bridge="tpu-x", subnet="10.88.7.0/24"), shape=NodeShape(),
    )  # fmt: skip


def test_a_node_serves_its_bridge_and_loopback_alone(node, tmp_path):
    settings = node_config.kubelet_config(node)
    assert settings["address"] == "10.88.7.1" == settings["clusterDNS"][0]
    assert settings["healthzBindAddress"] == "127.0.0.1" and settings["readOnlyPort"] == 0
    assert settings["authentication"]["anonymous"] == {"enabled": False}
    assert "bind 10.88.7.1" in node_config.corefile(node)
    plan = node_config.supervisor_config(node, Build(folder=tmp_path), tmp_path / "containerd")
    words = f"{plan} {settings} {node_config.corefile(node)} {node_config.cni_file(node)}"
    assert "0.0.0.0" not in words


def test_a_node_looks_like_one_of_gke(node):
    labels = node_config.node_labels(node)
    assert labels["cloud.google.com/gke-tpu-accelerator"] == "tpu-v5-lite-podslice"
    assert labels["cloud.google.com/gke-tpu-topology"] == "4x4"
    assert labels["topology.kubernetes.io/region"] == "us-central1"


def test_folders_that_programs_insist_on_are_covered_by_the_nodes_own(node, tmp_path):
    plan = node_config.supervisor_config(node, Build(folder=tmp_path), tmp_path / "containerd")
    assert {"/run/containerd", "/var/lib/kubelet", "/var/lib/cni"} <= set(plan.bind_mounts)
    assert all(path.startswith(str(node.folder)) for path in plan.bind_mounts.values())
    assert len(set(plan.bind_mounts.values())) == len(plan.bind_mounts)


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2")
def test_each_cluster_has_a_bridge_and_addresses_of_its_own(tmp_path):
    one, two = bridge_network.allocate(tmp_path / "one"), bridge_network.allocate(tmp_path / "two")
    assert one.bridge != two.bridge and len(one.bridge) <= 15
    assert one.gateway.endswith(".1")
    assert bridge_network.allocate(tmp_path / "one") == one


@pytest.mark.parametrize(
    ("absent", "package"),
    [("containerd", "containerd"), ("runc", "runc"), ("ip", "iproute2")],
)
def test_a_program_that_is_not_here_is_named_with_its_package(monkeypatch, absent, package):
    monkeypatch.setattr(real_node.sys, "platform", "linux")
    monkeypatch.setattr(real_node.os, "geteuid", lambda: 0)
    found = {"containerd", "ctr", "runc", "ip"} - {absent}
    monkeypatch.setattr(real_node.shutil, "which", lambda name: name if name in found else None)
    assert f"apt-get install {package}" in real_node.unsupported_reason()


def test_who_is_not_root_is_told_so_before_anything_is_started(monkeypatch):
    monkeypatch.setattr(real_node.sys, "platform", "linux")
    monkeypatch.setattr(real_node.os, "geteuid", lambda: 1000)
    with pytest.raises(real_node.RealNodeUnsupported, match="sudo"):
        commands.check_node()
