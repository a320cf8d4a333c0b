"""The real node itself: it comes in seconds, and nothing of it stays behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.k8s.rigs import eventually
from tpufleet.errors import Conflict, FleetError
from tpufleet.testbed.kubernetes import cluster
from tpufleet.testbed.kubernetes.node import node_config, real_node, supervisor
from tpufleet.testbed.kubernetes.processes import ProcessRegistry

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def own_plane(plane):
    """Another control plane beside the one of all tests, so that its node may be hurt."""
    why_not = real_node.unsupported_reason()
    if why_not:
        pytest.skip(why_not)
    folder = Path(tempfile.mkdtemp(prefix=f"tpufleet-test-cluster-{os.getpid()}-"))
    try:
        yield cluster.up(folder)
    finally:
        cluster.down(folder)
        shutil.rmtree(folder, ignore_errors=True)


def run_a_pod(plane, node) -> None:
    """One that needs no image but the node's own."""
    images = json.loads(plane.kubectl("get", "node", node.name, "--output=json"))["status"]
    pause = next(name for image in images["images"] for name in image["names"] if "pause" in name)
    container = {"name": "main", "image": pause, "imagePullPolicy": "Never"}
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"},
        "spec": {
            "nodeName": node.name, "tolerations": [{"operator": "Exists"}],
            "automountServiceAccountToken": False, "containers": [container],
        },
    }  # fmt: skip

    def created() -> bool:
        # A fresh control plane makes its first service account a moment later.
        plane.kubectl("apply", "--filename=-", stdin=json.dumps(pod))
        return True

    eventually(created, 60)
    phase = ("get", "pod", "one", "--output=jsonpath={.status.phase}")
    eventually(lambda: plane.kubectl(*phase) == "Running", 60, lambda: plane.kubectl(*phase))


def left(node) -> list[str]:
    """Whatever of a node is still there."""
    mark = str(node.folder)
    found = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if mark in line]
    found += [node.network.bridge] if node.network.exists else []
    found += [str(path) for path in (node.folder, node.shared) if path.exists()]
    for process in psutil.process_iter(["cmdline"]):
        if any(mark in word for word in process.info["cmdline"] or ()):
            found.append(" ".join(process.info["cmdline"]))
    if shutil.which("iptables-save"):
        rules = subprocess.run(["iptables-save"], capture_output=True, text=True, check=False)
        found += [line for line in rules.stdout.splitlines() if node.network.bridge in line]
    return found


def groups() -> set[str]:
    return {str(path) for path in Path("/sys/fs/cgroup").glob("**/k8s.io/*/")}


def covered() -> set[str]:
    return {path for path in node_config.PRIVATE_FOLDERS if Path(path).exists()}


def inside(node, *names: str) -> list[int]:
    found = []
    for pid in supervisor.namespace_members(node.namespace_file.read_text()):
        if psutil.Process(pid).name().startswith(names):
            found.append(pid)
    return found


def nothing(node) -> None:
    """All is well."""


def the_enclosure(node) -> None:
    (running,) = (
        one for one in ProcessRegistry(node.plane.folder).all() if one.name == real_node.COMPONENT
    )
    os.kill(running.pid, signal.SIGKILL)


def its_programs(node) -> None:
    for pid in inside(node, "kubelet", "containerd", "dns"):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("killed", [nothing, the_enclosure, its_programs], ids=lambda f: f.__name__)
def test_a_node_is_taken_away_without_leftovers_whatever_was_killed(own_plane, killed):
    before, folders = groups(), covered()
    node = real_node.add(own_plane)
    with pytest.raises(Conflict):
        real_node.add(own_plane)
    run_a_pod(own_plane, node)
    assert groups() > before and inside(node, "containerd-shim")
    killed(node)
    assert real_node.remove(own_plane.layout.folder) is True
    assert left(node) == [] and groups() == before and covered() == folders
    assert real_node.remove(own_plane.layout.folder) is False
    own_plane.kubectl("delete", "pod", "one", "--force", "--grace-period=0")
    own_plane.kubectl("delete", "node", node.name)


def test_a_node_that_cannot_start_says_why_and_leaves_nothing(own_plane, monkeypatch):
    monkeypatch.setattr(real_node, "READY_WITHIN", 3.0)
    monkeypatch.setattr(real_node.node_configs, "kubelet", lambda node: {"kind": "Nonsense"})
    with pytest.raises(FleetError, match="Nonsense"):
        real_node.add(own_plane)
    assert real_node.find(own_plane.layout) is None
    assert not list(Path("/sys/class/net").glob(real_node.networks.allocate(
        own_plane.layout.folder).bridge))  # fmt: skip


def test_down_takes_the_node_along(own_plane):
    folder = own_plane.layout.folder
    node = real_node.add(own_plane)
    (status,) = (one for one in cluster.status(folder) if one.name == real_node.COMPONENT)
    assert status.alive and status.memory > 50 * 2**20  # with all that runs on it
    assert cluster.down(folder) is True
    assert left(node) == [] and not folder.exists()
