"""Building the control plane binaries: once per set of sources, or a clear error."""

from __future__ import annotations

import os
import threading

import pytest

from tpufleet_testbed.kubernetes import binaries, go_sources
from tpufleet_testbed.kubernetes.binaries import Build, ControlPlaneBuildError

FAKE_GO = """#!/bin/sh
case "$1 $2" in
"env GOVERSION") echo go{version};;
"env GOCACHE") echo "$HOME/a"; echo "$HOME/b";;
"mod download") cat "$HOME/module.json";;
build*) echo one more package >&2; {build};;
esac
"""


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Installs a fake Go toolchain."""
    folder = tmp_path / "bin"
    folder.mkdir()
    module = tmp_path / "module"
    for patterns in go_sources.MANIFESTS.values():
        for pattern in patterns:
            file = module / pattern.replace("*", "one")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("{}")
    for _, path, _, line, _ in go_sources.PATCHED_FILES:
        (module / path).parent.mkdir(parents=True, exist_ok=True)
        (module / path).write_text(line)
    (tmp_path / "module.json").write_text(f'{{"Dir": "{module}"}}')
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")

    def install(version="1.26.1", build='echo built >> "$HOME/builds"'):
        (folder / "go").write_text(FAKE_GO.format(version=version, build=build))
        (folder / "go").chmod(0o755)

    return install


def test_concurrent_callers_share_one_build(go, tmp_path):
    go()
    builds: list[Build] = []
    callers = [
        threading.Thread(target=lambda: builds.append(binaries.ensure(root=tmp_path / "cache")))
        for _ in range(4)
    ]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert len({build.folder for build in builds}) == 1
    assert (tmp_path / "builds").read_text().count("built") == len(go_sources.BUILD_STEPS)
    assert builds[0].manifests("sigs.k8s.io/kwok")


def test_a_failed_build_shows_the_compiler_output_and_leaves_nothing(go, tmp_path):
    go(build="echo undefined: foo >&2; exit 1")
    with pytest.raises(ControlPlaneBuildError, match="undefined: foo"):
        binaries.ensure(root=tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_without_go_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ControlPlaneBuildError, match=r"not found on PATH; install Go 1\.26"):
        binaries.ensure(root=tmp_path)


def test_an_old_go_is_rejected(go, tmp_path):
    go(version="1.19.8")
    with pytest.raises(ControlPlaneBuildError, match=r"go1\.19\.8; install Go"):
        binaries.ensure(root=tmp_path)


def test_disk_space_is_checked_before_the_build(tmp_path):
    with pytest.raises(ControlPlaneBuildError, match="free disk space"):
        binaries.check_disk_space([tmp_path / "not" / "there" / "yet"], needed=2**60)


def test_a_module_that_cannot_be_patched_is_rejected(go, tmp_path):
    go()
    (tmp_path / "module" / go_sources.PATCHED_FILES[0][1]).write_text("something else")
    with pytest.raises(ControlPlaneBuildError, match="cannot patch"):
        binaries.ensure(root=tmp_path / "cache")


def test_the_build_key_changes_with_the_sources(tmp_path, monkeypatch):
    before = go_sources.build_key()
    (tmp_path / "main.go").write_text("package main")
    monkeypatch.setattr(go_sources, "GO_SOURCES", tmp_path)
    assert go_sources.build_key() != before
