"""Earlier releases of Kubernetes, JobSet and Kueue: the tests of the provisioner, the provider and
queues once more, on a control plane with each of them. `-m versions`; each release is built once
(minutes)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.k8s import earlier_releases
from tpufleet_testbed.kubernetes import binaries, cluster
from tpufleet_testbed.kubernetes.binaries import ControlPlaneBuildError

ROOT = Path(__file__).parents[2]
MARKS = "not chaos and not scale and not versions"  # the slow ones too
FILES = ("test_gke_provider.py", "test_provisioner.py", "test_team_queues.py")


@pytest.mark.versions
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "release", earlier_releases.EARLIER_RELEASES, ids=lambda release: release.title
)
def test_an_earlier_release_passes_the_same_tests(release):
    if binaries.find_cached() is None:
        pytest.skip("control plane not built; run `tpu cluster local build` (requires Go)")
    try:
        build = earlier_releases.ensure(release)
    except ControlPlaneBuildError as error:
        pytest.skip(f"{release.title} cannot be built here: {error}")
    folder = Path(tempfile.mkdtemp(prefix="tpufleet-versions-"))
    try:
        cluster.up(folder, build=build)
        tests = [f"tests/k8s/{name}" for name in FILES]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", MARKS, *tests],
            cwd=ROOT, env={**os.environ, "TPUFLEET_TEST_CLUSTER": str(folder)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:]
        assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]
    finally:
        cluster.down(folder)
        shutil.rmtree(folder, ignore_errors=True)
