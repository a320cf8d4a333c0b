"""Building a control plane: once, from pinned sources, and in words when it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tpufleet.testbed.kubernetes import (
    binaries,
    cluster_layout,
    components,
    go_sources,
    kwok_nodes,
    processes,
)
from tpufleet.testbed.kubernetes.binaries import Build, ControlPlaneBuildError
from tpufleet.testbed.kubernetes.components import Component

GO = """#!/bin/sh
case "$1 $2" in
"env GOVERSION") echo go{version};;
"env GOCACHE") echo "$HOME/a"; echo "$HOME/b";;
"mod download") cat "$HOME/module.json";;
build*) echo one more package >&2; {build};;
esac
"""


@pytest.fixture
def go(tmp_path, monkeypatch):
    """A program that answers as Go would."""
    folder = tmp_path / "bin"
    folder.mkdir()
    module = tmp_path / "module"
    for patterns in go_sources.MANIFESTS.values():
        for pattern in patterns:
            file = module / pattern.replace("*", "one")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("{}")
    for _, file, _, line, _ in go_sources.PATCHED_FILES:
        (module / file).parent.mkdir(parents=True, exist_ok=True)
        (module / file).write_text(line)
    (tmp_path / "module.json").write_text(f'{{"Dir": "{module}"}}')
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")

    def write(version="1.26.1", build='echo built >> "$HOME/builds"'):
        (folder / "go").write_text(GO.format(version=version, build=build))
        (folder / "go").chmod(0o755)

    return write


def test_the_same_sources_are_built_once_however_many_ask(go, tmp_path):
    go()
    found: list[Build] = []
    asking = [
        threading.Thread(target=lambda: found.append(binaries.ensure(root=tmp_path / "cache")))
        for _ in range(4)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len({build.folder for build in found}) == 1
    assert (tmp_path / "builds").read_text().count("built") == len(go_sources.BUILD_STEPS)
    assert found[0].manifests("sigs.k8s.io/kwok")


def test_a_build_that_fails_says_why_and_leaves_nothing(go, tmp_path):
    go(build="echo the disk is on fire >&2; exit 1")
    with pytest.raises(ControlPlaneBuildError, match="the disk is on fire"):
        binaries.ensure(root=tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_without_go_or_with_an_old_one_the_reader_is_told_what_to_do(go, tmp_path):
    with pytest.raises(ControlPlaneBuildError, match=r"not here; install Go 1\.26"):
        binaries.ensure(root=tmp_path)
    go(version="1.19.8")
    with pytest.raises(ControlPlaneBuildError, match=r"go1\.19\.8; install Go"):
        binaries.ensure(root=tmp_path)


def test_a_disk_that_is_too_small_is_found_before_the_build(tmp_path):
    with pytest.raises(ControlPlaneBuildError, match="make room"):
        binaries.check_disk_space([tmp_path / "not" / "there" / "yet"], needed=2**60)


def test_a_module_that_is_not_the_one_we_know_is_refused(go, tmp_path):
    go()
    (tmp_path / "module" / go_sources.PATCHED_FILES[0][1]).write_text("something else")
    with pytest.raises(ControlPlaneBuildError, match="not the one we know"):
        binaries.ensure(root=tmp_path / "cache")


def test_the_key_changes_with_the_sources(tmp_path, monkeypatch):
    before = go_sources.build_key()
    (tmp_path / "main.go").write_text("package main")
    monkeypatch.setattr(go_sources, "SOURCES", tmp_path)
    assert go_sources.build_key() != before


def test_ports_are_never_given_twice():
    assert len(set(cluster_layout.free_ports(50))) == 50


def test_every_part_listens_on_loopback_alone(tmp_path):
    layout = cluster_layout.new_layout(tmp_path)
    build = Build(folder=Path("/build"))
    parts = (
        *components.base_components(layout, build), *components.controller_components(layout, build),
        *components.extension_components(layout, build),
    )  # fmt: skip
    words = " ".join(word for part in parts for word in part.argv)
    words += str(components.config_files(layout))
    assert "0.0.0.0" not in words
    for port in layout.ports.values():
        assert f"127.0.0.1:{port}" in words or f"port={port}" in words or str(port) in words


def test_processes_are_remembered_and_ended_in_reverse(tmp_path):
    ledger = processes.ProcessRegistry(tmp_path)
    for name in ("one", "two"):
        ledger.start(Component(name=name, argv=("sleep", "100")))
    again = processes.ProcessRegistry(tmp_path)
    assert [running.name for running in again.all()] == ["one", "two"]
    pids = [running.process for running in again.all()]
    again.stop()
    assert again.all() == [] and not any(process.is_running() for process in pids)


FORGETFUL = """
import sys, time
from pathlib import Path
from tpufleet.testbed.kubernetes.components import Part
from tpufleet.testbed.kubernetes.processes import Ledger
Ledger(Path(sys.argv[1])).start(Part(name="one", argv=("sleep", "100")))
print("started", flush=True)
time.sleep(100)
"""


def test_a_part_whose_parent_does_not_wait_for_it_has_ended_all_the_same(tmp_path):
    argv = [sys.executable, "-c", FORGETFUL, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout.readline() == "started\n"
            ledger = processes.ProcessRegistry(tmp_path)
            (running,) = ledger.all()
            ledger.stop(grace=60)
            assert ledger.all() == [] and running.process is None
        finally:
            parent.kill()


def test_a_part_that_dies_at_once_is_told_with_the_end_of_its_log(tmp_path):
    ledger = processes.ProcessRegistry(tmp_path)
    part = Component(
        name="bad", argv=("sh", "-c", "echo no licence"), ready_url="http://127.0.0.1:1/"
    )
    running = ledger.start(part)
    with pytest.raises(processes.ComponentNotReady, match="no licence"):
        ledger.wait_ready(part, running, None, within=20)
    ledger.stop()


def test_nodes_look_like_those_of_gke():
    pool = kwok_nodes.KwokNodePool(
        name="p", nodes=2, accelerator="tpu-v5-lite-podslice", topology="2x4",
        machine_type="ct5lp-hightpu-4t", chips=4, labels={"job-key": "k"},
    )  # fmt: skip
    one, two = kwok_nodes.node_manifests(pool)
    assert one["metadata"]["name"] != two["metadata"]["name"]
    assert one["status"]["allocatable"]["google.com/tpu"] == "4"
    assert one["metadata"]["labels"]["cloud.google.com/gke-nodepool"] == "p"
    assert one["metadata"]["labels"]["job-key"] == "k"
    assert one["spec"]["taints"][0]["key"] == "google.com/tpu"
