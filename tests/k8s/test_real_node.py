"""The real node: starts, runs a pod, and leaves nothing behind however it ends."""

from __future__ import annotations

import contextlib
import glob
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
from tpufleet_testbed.kubernetes import cluster
from tpufleet_testbed.kubernetes.node import bridge_network, node_config, real_node
from tpufleet_testbed.kubernetes.processes import ProcessRegistry


@pytest.fixture(scope="module")
def own_plane(control_plane_build):
    """A control plane whose node these tests may break."""
    reason = real_node.unsupported_reason()
    if reason:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix=f"tpufleet-test-cluster-{os.getpid()}-"))
    try:
        yield cluster.up(folder)
    finally:
        cluster.down(folder)
        shutil.rmtree(folder, ignore_errors=True)


def run_a_pod(plane, node) -> None:
    """Run a pod from the pause image, which every node has."""

    def pause_image() -> str | None:
        # The kubelet lists its images some time after the node is ready.
        status = json.loads(plane.kubectl("get", "node", node.name, "--output=json"))["status"]
        names = (name for image in status.get("images", ()) for name in image["names"])
        return next((name for name in names if "pause" in name), None)

    pause = eventually(pause_image, 120)
    container = {"name": "main", "image": pause, "imagePullPolicy": "Never"}
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"},
        "spec": {
            "nodeName": node.name, "tolerations": [{"operator": "Exists"}],
            "automountServiceAccountToken": False, "containers": [container],
        },
    }  # fmt: skip

    def created() -> bool:
        # A new control plane creates the default service account with a delay.
        plane.kubectl("apply", "--filename=-", stdin=json.dumps(pod))
        return True

    eventually(created, 60)
    phase = ("get", "pod", "one", "--output=jsonpath={.status.phase}")
    eventually(lambda: plane.kubectl(*phase) == "Running", 60, lambda: plane.kubectl(*phase))


def leftovers(node) -> list[str]:
    """Mounts, devices, folders, processes and firewall rules of a node that still exist."""
    folder = str(node.folder)
    remaining = [
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if folder in line
    ]
    remaining += [node.network.bridge] if node.network.exists else []
    remaining += [str(path) for path in (node.folder, node.shared) if path.exists()]
    for process in psutil.process_iter(["cmdline"]):
        if any(folder in arg for arg in process.info["cmdline"] or ()):
            remaining.append(" ".join(process.info["cmdline"]))
    if shutil.which("iptables-save"):
        rules = subprocess.run(["iptables-save"], capture_output=True, text=True, check=False)
        remaining += [line for line in rules.stdout.splitlines() if node.network.bridge in line]
    return remaining


def cgroups() -> set[str]:
    # `Path.glob` fails when other tests remove groups meanwhile.
    return set(glob.glob("/sys/fs/cgroup/**/k8s.io/*/", recursive=True))


def mount_points() -> set[str]:
    return {path for path in node_config.PRIVATE_FOLDERS if Path(path).exists()}


def inside(node, *names: str) -> list[int]:
    pids = []
    for pid in real_node.node_processes(node):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
            if psutil.Process(pid).name().startswith(names):
                pids.append(pid)
    return pids


def nothing(node) -> None:
    """Kill nothing."""


def the_supervisor(node) -> None:
    registry = ProcessRegistry(node.plane.folder)
    (record,) = (record for record in registry.all() if record.name == real_node.COMPONENT)
    os.kill(record.pid, signal.SIGKILL)


def all_programs(node) -> None:
    for pid in inside(node, "kubelet", "containerd", "dns"):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "killed", [nothing, the_supervisor, all_programs], ids=lambda f: f.__name__
)
def test_a_node_is_removed_without_leftovers_after_killing(own_plane, killed):
    before, folders = cgroups(), mount_points()
    node = real_node.add(own_plane)
    with pytest.raises(Conflict):
        real_node.add(own_plane)
    run_a_pod(own_plane, node)
    assert cgroups() > before and inside(node, "containerd-shim")
    killed(node)
    assert real_node.remove(own_plane.layout.folder) is True
    assert leftovers(node) == [] and cgroups() == before and mount_points() == folders
    assert real_node.remove(own_plane.layout.folder) is False
    own_plane.kubectl("delete", "pod", "one", "--force", "--grace-period=0")
    own_plane.kubectl("delete", "node", node.name)


@pytest.mark.slow
def test_a_node_that_cannot_start_reports_the_cause_and_leaves_nothing(own_plane, monkeypatch):
    monkeypatch.setattr(real_node, "READY_TIMEOUT", 3.0)
    monkeypatch.setattr(node_config, "kubelet_config", lambda node: {"kind": "Nonsense"})
    with pytest.raises(FleetError, match="Nonsense"):
        real_node.add(own_plane)
    assert real_node.find(own_plane.layout) is None
    assert not bridge_network.allocate(own_plane.layout.folder).exists


@pytest.mark.slow
def test_down_removes_the_node(own_plane):
    folder = own_plane.layout.folder
    node = real_node.add(own_plane)
    (status,) = (one for one in cluster.status(folder) if one.name == real_node.COMPONENT)
    assert status.alive and status.memory > 50 * 2**20  # including its pods
    assert cluster.down(folder) is True
    assert leftovers(node) == [] and not folder.exists()
