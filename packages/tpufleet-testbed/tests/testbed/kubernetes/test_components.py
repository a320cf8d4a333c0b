"""Configuration of a control plane: loopback only, distinct ports, nodes as GKE labels them."""

from __future__ import annotations

from pathlib import Path

from tpufleet_testbed.kubernetes import cluster_layout, components, kwok_nodes
from tpufleet_testbed.kubernetes.binaries import Build
from tpufleet_testbed.kubernetes.kwok_nodes import KwokNodePool


def test_free_ports_are_distinct():
    assert len(set(cluster_layout.free_ports(50))) == 50


def test_every_component_listens_on_loopback_only(tmp_path):
    layout = cluster_layout.new_layout(tmp_path)
    build = Build(folder=Path("/build"))
    all_components = (
        *components.base_components(layout, build),
        *components.controller_components(layout, build),
        *components.extension_components(layout, build),
    )
    text = " ".join(arg for component in all_components for arg in component.argv)
    text += str(components.config_files(layout))
    assert "0.0.0.0" not in text
    emulated_gke = {"gke", "gke_health"}  # started by `up --gke` alone
    for port in (layout.ports[name] for name in layout.ports if name not in emulated_gke):
        assert f"127.0.0.1:{port}" in text or f"port={port}" in text or str(port) in text


def test_kwok_nodes_have_the_labels_and_taints_of_gke():
    pool = KwokNodePool(
        name="p",
        nodes=2,
        accelerator="tpu-v5-lite-podslice",
        topology="2x4",
        machine_type="ct5lp-hightpu-4t",
        chips=4,
        labels={"job-key": "k"},
    )
    first, second = kwok_nodes.node_manifests(pool)
    assert first["metadata"]["name"] != second["metadata"]["name"]
    assert first["status"]["allocatable"]["google.com/tpu"] == "4"
    assert first["metadata"]["labels"]["cloud.google.com/gke-nodepool"] == "p"
    assert first["metadata"]["labels"]["job-key"] == "k"
    assert first["spec"]["taints"][0]["key"] == "google.com/tpu"
