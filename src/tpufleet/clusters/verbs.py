"""What `tpu cluster local` does with a control plane in a folder."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpufleet.clusters import (
    building,
    control_planes,
    images,
    leader_worker_sets,
    node_images,
    real_nodes,
    workplaces,
)
from tpufleet.clusters.building import Progress
from tpufleet.clusters.control_planes import ComponentStatus
from tpufleet.clusters.node_configs import NodeShape


def build(progress: Progress) -> Path:
    return building.ensure(progress).folder


def up(folder: Path, progress: Progress) -> Path:
    return control_planes.up(folder, progress).kubeconfig


def add_leader_worker_sets(folder: Path, progress: Progress) -> None:
    leader_worker_sets.install(control_planes.find(folder), progress)


def add_node(folder: Path, progress: Progress, accelerator: str, topology: str, chips: int) -> None:
    """Give a control plane that runs a real node, with the image and a volume for pods."""
    plane = control_planes.find(folder)
    image = images.build(progress=progress)
    shape = NodeShape(accelerator=accelerator, topology=topology, chips=chips)
    node = real_nodes.add(plane, shape, progress)
    progress(f"importing {image.reference}")
    node_images.load_image(node, image)
    workplaces.apply_manifests(plane, node)
    workplaces.save_image(node, image.reference)


def check_node() -> None:
    """Before minutes are spent on what cannot be."""
    why_not = real_nodes.unsupported_reason()
    if why_not:
        raise real_nodes.RealNodeUnsupported(why_not)


def settings(folder: Path) -> Mapping[str, str]:
    """Variables with which a server runs jobs on the real node."""
    plane = control_planes.find(folder)
    return workplaces.server_settings(plane, real_nodes.get(plane.layout))


def kubectl(folder: Path, args: Sequence[str]) -> int:
    """Run the kubectl of the same version. Its exit status."""
    plane = control_planes.find(folder)
    argv = [str(plane.build.harness), "kubectl", f"--kubeconfig={plane.kubeconfig}", *args]
    return subprocess.run(argv, check=False).returncode


def image(target: Path, tpu: bool, progress: Progress) -> str:
    """Build the image into an archive. Its name."""
    built = images.build(arguments={} if tpu else images.CPU_ONLY, progress=progress)
    with target.open("wb") as out:
        built.write(out)
    return built.reference


def down(folder: Path) -> bool:
    return control_planes.down(folder)


def status(folder: Path) -> Sequence[ComponentStatus]:
    return control_planes.status(folder)
