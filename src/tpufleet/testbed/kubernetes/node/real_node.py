"""A real node beside those that KWOK plays: kubelet, containerd and DNS on a bridge, so that pods
run as containers that find each other by name. Nothing stays when it is taken away."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import yaml

from tpufleet.errors import Conflict, FleetError, NotFound, Permanent
from tpufleet.testbed.kubernetes import certificates, cluster_layout, kwok_nodes
from tpufleet.testbed.kubernetes.binaries import Progress
from tpufleet.testbed.kubernetes.cluster_layout import ControlPlaneLayout
from tpufleet.testbed.kubernetes.components import Component
from tpufleet.testbed.kubernetes.image.oci import Image
from tpufleet.testbed.kubernetes.node import bridge_network, node_config, node_images, supervisor
from tpufleet.testbed.kubernetes.node.bridge_network import BridgeNetwork
from tpufleet.testbed.kubernetes.node.node_config import NodeLayout, NodeShape
from tpufleet.testbed.kubernetes.processes import ComponentNotReady, ProcessRegistry

if TYPE_CHECKING:
    from tpufleet.testbed.kubernetes.control_plane import ControlPlane

COMPONENT = "node"
NAME = "real-node"
PLUGINS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
PROGRAMS = {"containerd": "containerd", "ctr": "containerd", "runc": "runc", "ip": "iproute2"}
CONTROL_GROUPS = Path("/sys/fs/cgroup")
LONGEST_SOCKET = 100  # of 107 that the kernel allows; containerd appends to it
READY_WITHIN = 60.0
GONE_WITHIN = 20.0


class RealNodeUnsupported(FleetError, Permanent):
    """This machine cannot run a real node as things are; the message says what it lacks."""


def unsupported_reason() -> str:
    """Why there can be no real node here, in words; empty when there can."""
    if sys.platform != "linux":
        return "a real node needs Linux"
    if os.geteuid() != 0:
        return "a real node needs root; run it with sudo"
    lacking = {package for name, package in PROGRAMS.items() if shutil.which(name) is None}
    if _plugins() is None:
        lacking.add("containernetworking-plugins")
    if lacking:
        packages = " ".join(sorted(lacking))
        return f"a real node needs programs that are not here; `apt-get install {packages}`"
    return ""


def add(
    plane: ControlPlane, shape: NodeShape | None = None, progress: Progress = lambda words: None
) -> NodeLayout:
    why_not = unsupported_reason()
    if why_not:
        raise RealNodeUnsupported(why_not)
    if find(plane.layout) is not None:
        raise Conflict("this cluster has a real node already")
    began = time.monotonic()
    node = _prepare(plane, shape or NodeShape())
    try:
        node.network.create()
        pause = node_images.pause_image(plane)
        _write(node, plane, pause)
        _start(node, plane, pause)
    except BaseException:
        remove(plane.layout.folder)
        raise
    progress(f"node {node.name} is ready after {time.monotonic() - began:.0f} s")
    return node


def remove(folder: Path) -> bool:
    """Take the real node of a control plane away, whatever is left of it. False: there was none."""
    layout = cluster_layout.load_layout(folder.absolute())
    node = find(layout) if layout is not None else None
    if node is None:
        return False
    ProcessRegistry(node.plane.folder).stop([COMPONENT])
    _end_members(node)
    node.network.delete()
    _remove_control_groups(node)
    supervisor.remove_mount_points(node_config.PRIVATE_FOLDERS)
    shutil.rmtree(node.folder, ignore_errors=True)
    shutil.rmtree(node.shared, ignore_errors=True)
    _described(node.plane).unlink(missing_ok=True)
    return True


def find(layout: ControlPlaneLayout) -> NodeLayout | None:
    try:
        said = json.loads(_described(layout).read_text())
    except FileNotFoundError:
        return None
    return NodeLayout(
        plane=layout, name=said["name"], ports=said["ports"],
        network=BridgeNetwork(**said["network"]), shape=NodeShape(**said["shape"]),
    )  # fmt: skip


def _described(layout: ControlPlaneLayout) -> Path:
    return layout.folder / "node.json"


def memory_used(node: NodeLayout) -> int:
    """Bytes that the node and everything on it use."""
    total = 0
    for pid in supervisor.namespace_members(_namespace(node)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += psutil.Process(pid).memory_info().rss
    return total


def _prepare(plane: ControlPlane, shape: NodeShape) -> NodeLayout:
    layout = plane.layout
    names = node_config.PORTS
    ports = dict(zip(names, cluster_layout.free_ports(len(names)), strict=True))
    node = NodeLayout(
        plane=layout,
        name=NAME,
        network=bridge_network.allocate(layout.folder),
        ports=ports,
        shape=shape,
    )
    if len(str(node.socket)) > LONGEST_SOCKET:
        raise RealNodeUnsupported(
            f"{node.socket} is too long for a socket; choose a shorter --folder"
        )
    said = {
        "name": node.name,
        "ports": ports,
        "shape": asdict(shape),
        "network": asdict(node.network),
    }
    # Before anything is made: what is written here is what `remove` takes away.
    _described(layout).write_text(json.dumps(said, indent=1))
    supervisor.create_mount_points(node_config.PRIVATE_FOLDERS)
    return node


def _write(node: NodeLayout, plane: ControlPlane, pause: Image) -> None:
    folder, plugins, runtime = node.folder, _plugins(), shutil.which("containerd")
    assert plugins is not None and runtime is not None
    (folder / "cni").mkdir(mode=0o700, parents=True)
    node.shared.mkdir(exist_ok=True)
    node.shared.chmod(0o1777)  # pods write to it as users of their own
    identity = f"/O=system:nodes/CN=system:node:{node.name}"
    certificates.issue_certificate(node.plane.pki, "node", identity, [f"DNS:{node.name}"])
    settings = node_config.containerd_config(
        node, snapshotter=_snapshotter(folder), plugins=plugins, pause=pause.reference
    )
    (folder / "containerd.toml").write_text(settings)
    (folder / "Corefile").write_text(node_config.corefile(node))
    for name, content in {
        "kubelet.yaml": node_config.kubelet_config(node),
        "kubeconfig": node_config.kubelet_kubeconfig(node),
    }.items():
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=False))
    (folder / "cni" / "10-pods.conflist").write_text(
        json.dumps(node_config.cni_file(node), indent=1)
    )
    plan = node_config.supervisor_config(node, plane.build, Path(runtime))
    for ours in plan.bind_mounts.values():
        Path(ours).mkdir(parents=True)
    (folder / "plan.json").write_text(plan.to_json())


def _start(node: NodeLayout, plane: ControlPlane, pause: Image) -> None:
    ledger = ProcessRegistry(node.plane.folder)
    argv = (
        sys.executable,
        "-m",
        "tpufleet.testbed.kubernetes.node.supervisor",
        str(node.folder / "plan.json"),
    )
    running = ledger.start(Component(name=COMPONENT, argv=argv))

    def wait_for(done: Callable[[], bool], what: str, log: str) -> None:
        deadline = time.monotonic() + READY_WITHIN
        while not done():
            if running.process is None or time.monotonic() > deadline:
                told = ledger.log_tail(COMPONENT, 4) + "\n" + ledger.log_tail(log)
                raise ComponentNotReady(f"the real node: {what} does not come up:\n{told}")
            time.sleep(0.1)

    wait_for(lambda: supervisor.socket_accepts(str(node.socket)), "containerd", "containerd")
    node_images.load_image(node, pause)
    wait_for(lambda: _ready(plane, node.name), "kubelet", "kubelet")
    chips = [
        {"op": "add", "path": f"/status/{of}/{kwok_nodes.TPU.replace('/', '~1')}",
         "value": str(node.shape.chips)}
        for of in ("capacity", "allocatable")
    ]  # fmt: skip
    plane.kubectl(
        "patch", "node", node.name, "--subresource=status", "--type=json", "-p", json.dumps(chips)
    )


def _ready(plane: ControlPlane, name: str) -> bool:
    said = plane.kubectl("get", "node", name, "--ignore-not-found", "--output=json")
    conditions = json.loads(said)["status"].get("conditions", []) if said else []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _end_members(node: NodeLayout) -> None:
    """Those inside end with their enclosure, but not at the same moment."""
    namespace = _namespace(node)
    deadline = time.monotonic() + GONE_WITHIN
    while namespace and (left := supervisor.namespace_members(namespace)):
        if time.monotonic() > deadline:
            raise FleetError(f"processes {left} of the real node in {node.folder} do not end")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        time.sleep(0.05)


def _namespace(node: NodeLayout) -> str:
    try:
        return node.namespace_file.read_text()
    except FileNotFoundError:
        return ""


def _remove_control_groups(node: NodeLayout) -> None:
    """Those of containers that runc had no time to remove. Version 1 has a tree for each
    controller, version 2 one."""
    tasks = node.folder / "state" / "io.containerd.runtime.v2.task" / "k8s.io"
    containers = [path.name for path in tasks.iterdir()] if tasks.is_dir() else []
    for tree in (CONTROL_GROUPS, *(path for path in CONTROL_GROUPS.iterdir() if path.is_dir())):
        for name in containers:
            for folder, _, _ in os.walk(tree / "k8s.io" / name, topdown=False):
                Path(folder).rmdir()
        with contextlib.suppress(OSError):  # not there, or others' are in there
            (tree / "k8s.io").rmdir()


def _snapshotter(folder: Path) -> str:
    """Layers upon each other where this machine can, else a copy for each container."""
    parts = {name: folder / "try" / name for name in ("lower", "upper", "work", "merged")}
    for path in parts.values():
        path.mkdir(parents=True)
    options = "lowerdir={lower},upperdir={upper},workdir={work}".format(**parts)
    # In a mount namespace of its own, so that the trial leaves no mount.
    argv = ["unshare", "--mount", "mount", "-t", "overlay", "overlay", "-o", options]
    tried = subprocess.run([*argv, str(parts["merged"])], capture_output=True, check=False)
    shutil.rmtree(folder / "try")
    return "overlayfs" if tried.returncode == 0 else "native"


def _plugins() -> Path | None:
    return next((path for path in PLUGINS if (path / "bridge").exists()), None)


def get(layout: ControlPlaneLayout) -> NodeLayout:
    found = find(layout)
    if found is None:
        raise NotFound("this cluster has no real node; `tpu cluster local up --node` gives it one")
    return found
