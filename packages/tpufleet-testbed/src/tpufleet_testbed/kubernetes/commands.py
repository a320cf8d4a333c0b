"""The operations behind `tpu cluster local`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpufleet_testbed.kubernetes import binaries, cluster, emulated_gke, leader_worker_sets
from tpufleet_testbed.kubernetes.binaries import Progress
from tpufleet_testbed.kubernetes.cluster import ComponentStatus
from tpufleet_testbed.kubernetes.image import builder, sbom
from tpufleet_testbed.kubernetes.node import job_namespace, node_images, real_node
from tpufleet_testbed.kubernetes.node.node_config import NodeShape


def build(progress: Progress) -> Path:
    return binaries.ensure(progress).folder


def up(folder: Path, progress: Progress) -> Path:
    return cluster.up(folder, progress).kubeconfig


def add_leader_worker_sets(folder: Path, progress: Progress) -> None:
    leader_worker_sets.install(cluster.find(folder), progress)


def add_node(folder: Path, progress: Progress, accelerator: str, topology: str, chips: int) -> None:
    """Add a real node to a running control plane, with the image and a volume for pods."""
    plane = cluster.find(folder)
    image = builder.build(progress=progress)
    shape = NodeShape(accelerator=accelerator, topology=topology, chips=chips)
    node = real_node.add(plane, shape, progress)
    progress(f"importing {image.reference}")
    node_images.load_image(node, image)
    job_namespace.apply_manifests(plane, node)
    job_namespace.save_image(node, image.reference)


def add_gke(folder: Path, progress: Progress, plan: Path | None = None) -> None:
    emulated_gke.start(cluster.find(folder), progress, plan)


def check_gke(plan: Path | None) -> None:
    """Fail early, before a cluster is started."""
    emulated_gke.check_packages()
    if plan is not None:
        emulated_gke.check_plan(plan)


def check_node() -> None:
    """Fail early, before minutes are spent on a build."""
    reason = real_node.unsupported_reason()
    if reason:
        raise real_node.RealNodeUnsupported(reason)


def settings(folder: Path) -> Mapping[str, str]:
    """Environment variables for a server that runs jobs on the real node, and for a provisioner
    that uses the emulated GKE; whichever there are."""
    plane = cluster.find(folder)
    if not emulated_gke.is_running(plane.layout):
        return job_namespace.server_settings(plane, real_node.get(plane.layout))
    node = real_node.find(plane.layout)
    on_node = job_namespace.server_settings(plane, node) if node is not None else {}
    return {**on_node, **emulated_gke.provisioner_settings(plane)}


def kubectl(folder: Path, args: Sequence[str]) -> int:
    """Run the kubectl of the same version. Returns its exit status."""
    plane = cluster.find(folder)
    argv = [str(plane.build.harness), "kubectl", f"--kubeconfig={plane.kubeconfig}", *args]
    return subprocess.run(argv, check=False).returncode


def image(target: Path, variant: str, bill: Path | None, progress: Progress) -> str:
    """Build a container image into an archive, and its bill of materials beside it. Returns the
    image reference."""
    arguments = {"REQUIREMENTS": builder.VARIANTS[variant]}
    built = builder.build(arguments=arguments, progress=progress)
    with target.open("wb") as out:
        built.write(out)
    if bill is not None:
        bill.write_text(json.dumps(sbom.bill_of_materials(built), indent=1) + "\n")
    return built.reference


def down(folder: Path) -> bool:
    return cluster.down(folder)


def status(folder: Path) -> Sequence[ComponentStatus]:
    return cluster.status(folder)
