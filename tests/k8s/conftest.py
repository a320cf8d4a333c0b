"""One real control plane for all tests here; each test has its own namespace."""

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
from tpufleet_testbed.kubernetes import binaries, cluster
from tpufleet_testbed.kubernetes.control_plane import KubernetesControlPlane

PREFIX = "tpufleet-test-cluster-"
_numbers = itertools.count(1)
# Of the provider contract, by default what Kubernetes has a part in; the rest as slow tests.
SLOW_PARTS_OF_THE_CONTRACT = {
    "test_an_order_of_several_slices_is_granted_as_a_whole",
    "test_releasing_an_unknown_slice_succeeds",
    "test_a_slice_can_be_released_before_it_is_up",
    "test_listing_changes_nothing",
    "test_an_order_that_does_not_fit_is_refused_as_a_whole",
    "test_a_release_frees_capacity",
    "test_concurrent_requests_never_exceed_capacity",
    "test_an_unknown_accelerator_is_a_bad_request",
    "test_a_boot_continues_after_a_crash_of_the_server",
    "test_a_slice_stays_up_during_its_notice_period",
    "test_a_stalled_host_looks_alive_to_the_provider",
    "test_a_fault_on_an_unknown_slice_is_a_bad_request",
    "test_a_fault_calls_the_change_listeners",
}


@pytest.fixture(scope="package")
def control_plane_build() -> None:
    """Skips tests where no control plane can be started."""
    pytest.importorskip("lightkube", reason="needs the extra `k8s`: pip install 'tpufleet[k8s]'")
    if binaries.find_cached() is None:
        pytest.skip("control plane not built; run `tpu cluster local build` (requires Go)")
    if shutil.which("openssl") is None:
        pytest.skip("openssl not found; apt-get install openssl")


# Not of the session: it would run, and use CPU, beside all later tests.
@pytest.fixture(scope="package")
def plane(control_plane_build: None) -> Iterator[KubernetesControlPlane]:
    running = os.environ.get("TPUFLEET_TEST_CLUSTER")
    if running:  # kept up between runs while working on these tests
        yield cluster.find(Path(running))
        return
    _remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    statuses: list[cluster.ComponentStatus] = []
    try:
        plane = cluster.up(folder)
        statuses = cluster.status(folder)
        yield plane
    finally:
        cluster.down(folder)
        shutil.rmtree(folder, ignore_errors=True)
    assert statuses and not any(psutil.pid_exists(status.pid) for status in statuses), (
        "processes left behind"
    )


def _remove_leftovers() -> None:
    """Stop clusters of test runs that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = int(folder.name.removeprefix(PREFIX).split("-")[0])
        if not psutil.pid_exists(owner):
            cluster.down(folder)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def rig(plane: KubernetesControlPlane, tmp_path: Path) -> Iterator[Rig]:
    pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")
    rig = Rig(plane, f"test-{os.getpid()}-{next(_numbers)}", tmp_path)
    try:
        yield rig
    finally:
        rig.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that need the control plane: they take minutes, and its build takes longer. And
    parts of the contract that take long on it."""
    here = Path(__file__).parent
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if item.path.is_relative_to(here) and "control_plane_build" in fixtures:
            item.add_marker(pytest.mark.cluster)
        if (
            item.path == here / "test_gke_provider.py"
            and getattr(item, "originalname", "") in SLOW_PARTS_OF_THE_CONTRACT
            and item.get_closest_marker("scale") is None
        ):
            item.add_marker(pytest.mark.slow)
