"""A real node beside the KWOK nodes: kubelet, containerd and DNS on a bridge network, so that pods
run as containers that resolve each other's names. Removing it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
import psutil
import yaml

from tpufleet.errors import Conflict, FleetError, NotFound, Permanent
from tpufleet_testbed.kubernetes import (
    certificates,
    cluster_layout,
    components,
    kwok_nodes,
    programs,
)
from tpufleet_testbed.kubernetes.binaries import Progress
from tpufleet_testbed.kubernetes.cluster_layout import ControlPlaneLayout
from tpufleet_testbed.kubernetes.components import Component
from tpufleet_testbed.kubernetes.control_plane import KubernetesControlPlane
from tpufleet_testbed.kubernetes.image.oci import Image
from tpufleet_testbed.kubernetes.node import bridge_network, node_config, node_images, supervisor
from tpufleet_testbed.kubernetes.node.bridge_network import BridgeNetwork
from tpufleet_testbed.kubernetes.node.node_config import NodeLayout, NodeShape
from tpufleet_testbed.kubernetes.processes import ComponentNotReady, ProcessRegistry

COMPONENT = "node"
NAME = "real-node"
# Debian package of each required program, and where it installs the CNI plugins.
PACKAGES = {"containerd": "containerd", "ctr": "containerd", "runc": "runc", "ip": "iproute2"}
CNI_PACKAGE = "containernetworking-plugins"
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
CGROUPS = Path("/sys/fs/cgroup")
MAX_SOCKET_PATH = 100  # the kernel allows 107; containerd appends to the path
READY_TIMEOUT = 300.0  # seconds
POLL_SECONDS = 0.5
STOP_TIMEOUT = 20.0  # seconds


class RealNodeUnsupported(FleetError, Permanent):
    """This machine cannot run a real node; the message says what is missing."""


def unsupported_reason() -> str:
    """Why this machine cannot run a real node; empty if it can."""
    reason = programs.unsupported_reason("a real node", missing_packages())
    if not reason and not supervisor.namespaces_allowed():
        return (
            "a real node requires CAP_SYS_ADMIN; run the command on a host or privileged container"
        )
    return reason


def missing_packages(
    path: str | None = None, cni_folders: Sequence[Path] = CNI_FOLDERS
) -> set[str]:
    """Debian packages to install. `path` is searched for programs; None means $PATH."""
    cni = set() if _cni_plugins(cni_folders) else {CNI_PACKAGE}
    return programs.missing_packages(PACKAGES, path) | cni


def add(
    plane: KubernetesControlPlane,
    shape: NodeShape | None = None,
    progress: Progress = lambda message: None,
) -> NodeLayout:
    reason = unsupported_reason()
    if reason:
        raise RealNodeUnsupported(reason)
    if find(plane.layout) is not None:
        raise Conflict("this cluster already has a real node")
    started_at = time.monotonic()
    node = _prepare(plane, shape or NodeShape())
    try:
        node.network.create()
        pause = node_images.pause_image(plane)
        _write_config(node, plane, pause)
        _start(node, plane, pause)
    except BaseException:
        remove(plane.layout.folder)
        raise
    progress(f"node {node.name} is ready after {time.monotonic() - started_at:.0f} s")
    return node


def remove(folder: Path) -> bool:
    """Remove the real node of the cluster in `folder`, whatever is left of it. False: none."""
    layout = cluster_layout.load_layout(folder.absolute())
    node = find(layout) if layout is not None else None
    if node is None:
        return False
    ProcessRegistry(node.plane.folder).stop([COMPONENT])
    _kill_members(node)
    node.network.delete()
    _remove_cgroups(node)
    supervisor.remove_mount_points(node_config.PRIVATE_FOLDERS)
    shutil.rmtree(node.folder, ignore_errors=True)
    shutil.rmtree(node.shared, ignore_errors=True)
    _record_file(node.plane).unlink(missing_ok=True)
    return True


def find(layout: ControlPlaneLayout) -> NodeLayout | None:
    try:
        record = json.loads(_record_file(layout).read_text())
    except FileNotFoundError:
        return None
    return NodeLayout(
        plane=layout,
        name=record["name"],
        ports=record["ports"],
        network=BridgeNetwork(**record["network"]),
        shape=NodeShape(**record["shape"]),
    )


def get(layout: ControlPlaneLayout) -> NodeLayout:
    node = find(layout)
    if node is None:
        raise NotFound("this cluster has no real node; add one with `tpu cluster local up --node`")
    return node


def memory_used(node: NodeLayout) -> int:
    """Bytes used by the node and all its pods."""
    total = 0
    for pid in node_processes(node):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += psutil.Process(pid).memory_info().rss
    return total


def _record_file(layout: ControlPlaneLayout) -> Path:
    return layout.folder / "node.json"


def _prepare(plane: KubernetesControlPlane, shape: NodeShape) -> NodeLayout:
    layout = plane.layout
    names = node_config.PORTS
    ports = dict(zip(names, cluster_layout.free_ports(len(names)), strict=True))
    network = bridge_network.allocate(layout.folder)
    node = NodeLayout(plane=layout, name=NAME, network=network, ports=ports, shape=shape)
    if len(str(node.socket)) > MAX_SOCKET_PATH:
        raise RealNodeUnsupported(
            f"socket path too long ({len(str(node.socket))} > {MAX_SOCKET_PATH} characters): "
            f"{node.socket}; choose a shorter --folder"
        )
    record = {
        "name": node.name,
        "ports": ports,
        "shape": asdict(shape),
        "network": asdict(network),
    }
    # Written before anything is created, because `remove` goes by it.
    _record_file(layout).write_text(json.dumps(record, indent=1))
    supervisor.create_mount_points(node_config.PRIVATE_FOLDERS)
    return node


def _write_config(node: NodeLayout, plane: KubernetesControlPlane, pause: Image) -> None:
    folder, plugins, containerd = node.folder, _cni_plugins(), shutil.which("containerd")
    assert plugins is not None and containerd is not None
    (folder / "cni").mkdir(mode=0o700, parents=True)
    node.shared.mkdir(exist_ok=True)
    node.shared.chmod(0o1777)  # pods write to it as different users
    subject = f"/O=system:nodes/CN=system:node:{node.name}"
    certificates.issue_certificate(node.plane.pki, "node", subject, [f"DNS:{node.name}"])
    (folder / "containerd.toml").write_text(
        node_config.containerd_config(
            node, snapshotter=_snapshotter(folder), plugins=plugins, pause=pause.reference
        )
    )
    (folder / "Corefile").write_text(node_config.corefile(node))
    for name, content in {
        "kubelet.yaml": node_config.kubelet_config(node),
        "kubeconfig": components.kubeconfig(node.plane, "node"),
    }.items():
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=False))
    (folder / "cni" / "10-pods.conflist").write_text(
        json.dumps(node_config.cni_file(node), indent=1)
    )
    config = node_config.supervisor_config(node, plane.build, Path(containerd))
    for source in config.bind_mounts.values():
        Path(source).mkdir(parents=True)
    (folder / "supervisor.json").write_bytes(msgspec.json.encode(config))


def _start(node: NodeLayout, plane: KubernetesControlPlane, pause: Image) -> None:
    registry = ProcessRegistry(node.plane.folder)
    argv = (sys.executable, "-m", supervisor.__name__, str(node.folder / "supervisor.json"))
    record = registry.start(Component(name=COMPONENT, argv=argv))

    def wait_for(is_ready: Callable[[], bool], program: str) -> None:
        deadline = time.monotonic() + READY_TIMEOUT
        while not is_ready():
            if record.process is None or time.monotonic() > deadline:
                logs = registry.log_tail(COMPONENT, 4) + "\n" + registry.log_tail(program)
                raise ComponentNotReady(f"{program} of the real node is not ready:\n{logs}")
            time.sleep(POLL_SECONDS)  # a kubectl each time takes CPU from what it waits for

    wait_for(lambda: supervisor.socket_accepts(str(node.socket)), "containerd")
    node_images.load_image(node, pause)
    wait_for(lambda: _is_ready(plane, node.name), "kubelet")
    chips = [
        {
            "op": "add",
            "path": f"/status/{field}/{kwok_nodes.TPU.replace('/', '~1')}",
            "value": str(node.shape.chips),
        }
        for field in ("capacity", "allocatable")
    ]
    plane.kubectl(
        "patch", "node", node.name, "--subresource=status", "--type=json", "-p", json.dumps(chips)
    )


def _is_ready(plane: KubernetesControlPlane, name: str) -> bool:
    output = plane.kubectl("get", "node", name, "--ignore-not-found", "--output=json")
    conditions = json.loads(output)["status"].get("conditions", []) if output else []
    return any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions
    )


def _kill_members(node: NodeLayout) -> None:
    """Processes in the namespace end after the supervisor, but not at the same moment."""
    deadline = time.monotonic() + STOP_TIMEOUT
    while pids := node_processes(node):
        if time.monotonic() > deadline:
            raise FleetError(
                f"processes {pids} of the real node in {node.folder} did not end after SIGKILL"
            )
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        time.sleep(0.05)


def node_processes(node: NodeLayout) -> list[int]:
    namespace = supervisor.PidNamespace.load(node.namespace_file)
    return [] if namespace is None else namespace.members()


def _remove_cgroups(node: NodeLayout) -> None:
    """Remove the cgroups of containers that runc did not get to remove. cgroup v1 has one tree per
    controller, v2 has one tree."""
    tasks = node.folder / "state" / "io.containerd.runtime.v2.task" / "k8s.io"
    containers = [path.name for path in tasks.iterdir()] if tasks.is_dir() else []
    for tree in (CGROUPS, *(path for path in CGROUPS.iterdir() if path.is_dir())):
        for name in containers:
            for folder, _, _ in os.walk(tree / "k8s.io" / name, topdown=False):
                Path(folder).rmdir()
        with contextlib.suppress(OSError):  # missing, or holds cgroups of another containerd
            (tree / "k8s.io").rmdir()


def _snapshotter(folder: Path) -> str:
    """overlayfs where this machine can mount it, else a full copy for each container."""
    trial = {name: folder / "try" / name for name in ("lower", "upper", "work", "merged")}
    for path in trial.values():
        path.mkdir(parents=True)
    options = "lowerdir={lower},upperdir={upper},workdir={work}".format(**trial)
    # In its own mount namespace, so that the trial leaves no mount.
    argv = ["unshare", "--mount", "mount", "-t", "overlay", "overlay", "-o", options]
    result = subprocess.run([*argv, str(trial["merged"])], capture_output=True, check=False)
    shutil.rmtree(folder / "try")
    return "overlayfs" if result.returncode == 0 else "native"


def _cni_plugins(folders: Sequence[Path] = CNI_FOLDERS) -> Path | None:
    return next((path for path in folders if (path / "bridge").exists()), None)
