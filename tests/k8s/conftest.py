"""One real control plane for all tests here, and namespaces of their own for each."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.k8s.rigs import Rig
from tpufleet.testbed.kubernetes import binaries, cluster
from tpufleet.testbed.kubernetes.control_plane import ControlPlane

PREFIX = "tpufleet-test-cluster-"
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def plane() -> Iterator[ControlPlane]:
    pytest.importorskip("lightkube", reason="needs the extra `k8s`: pip install 'tpufleet[k8s]'")
    if binaries.find_cached() is None:
        pytest.skip("no control plane is built here; `tpu cluster local up` builds it (needs Go)")
    running = os.environ.get("TPUFLEET_TEST_CLUSTER")
    if running:  # one that stays up between runs, for who works on these tests
        yield cluster.find(Path(running))
        return
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    parts: list[cluster.ComponentStatus] = []
    try:
        plane = cluster.up(folder)
        parts = cluster.status(folder)
        yield plane
    finally:
        cluster.down(folder)
        shutil.rmtree(folder, ignore_errors=True)
    assert parts and not any(psutil.pid_exists(part.pid) for part in parts), "it left processes"


def _sweep() -> None:
    """What a test run that was killed left behind."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = int(folder.name.removeprefix(PREFIX).split("-")[0])
        if not psutil.pid_exists(owner):
            cluster.down(folder)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def rig(plane: ControlPlane, tmp_path: Path) -> Iterator[Rig]:
    pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")
    rig = Rig(plane, f"test-{os.getpid()}-{next(_numbers)}", tmp_path)
    try:
        yield rig
    finally:
        rig.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever needs the control plane takes minutes, and a build that takes longer."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and "plane" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cluster)
