"""What `tpu cluster local` does with a control plane in a folder."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpufleet.testbed.kubernetes import binaries, control_plane, leader_worker_sets
from tpufleet.testbed.kubernetes.binaries import Progress
from tpufleet.testbed.kubernetes.control_plane import ComponentStatus
from tpufleet.testbed.kubernetes.image import builder
from tpufleet.testbed.kubernetes.node import job_namespace, node_images, real_node
from tpufleet.testbed.kubernetes.node.node_config import NodeShape


def build(progress: Progress) -> Path:
    return binaries.ensure(progress).folder


def up(folder: Path, progress: Progress) -> Path:
    return control_plane.up(folder, progress).kubeconfig


def add_leader_worker_sets(folder: Path, progress: Progress) -> None:
    leader_worker_sets.install(control_plane.find(folder), progress)


def add_node(folder: Path, progress: Progress, accelerator: str, topology: str, chips: int) -> None:
    """Give a control plane that runs a real node, with the image and a volume for pods."""
    plane = control_plane.find(folder)
    image = builder.build(progress=progress)
    shape = NodeShape(accelerator=accelerator, topology=topology, chips=chips)
    node = real_node.add(plane, shape, progress)
    progress(f"importing {image.reference}")
    node_images.load_image(node, image)
    job_namespace.apply_manifests(plane, node)
    job_namespace.save_image(node, image.reference)


def check_node() -> None:
    """Before minutes are spent on what cannot be."""
    why_not = real_node.unsupported_reason()
    if why_not:
        raise real_node.RealNodeUnsupported(why_not)


def settings(folder: Path) -> Mapping[str, str]:
    """Variables with which a server runs jobs on the real node."""
    plane = control_plane.find(folder)
    return job_namespace.server_settings(plane, real_node.get(plane.layout))


def kubectl(folder: Path, args: Sequence[str]) -> int:
    """Run the kubectl of the same version. Its exit status."""
    plane = control_plane.find(folder)
    argv = [str(plane.build.harness), "kubectl", f"--kubeconfig={plane.kubeconfig}", *args]
    return subprocess.run(argv, check=False).returncode


def image(target: Path, tpu: bool, progress: Progress) -> str:
    """Build the image into an archive. Its name."""
    built = builder.build(arguments={} if tpu else builder.CPU_ONLY, progress=progress)
    with target.open("wb") as out:
        built.write(out)
    return built.reference


def down(folder: Path) -> bool:
    return control_plane.down(folder)


def status(folder: Path) -> Sequence[ComponentStatus]:
    return control_plane.status(folder)
