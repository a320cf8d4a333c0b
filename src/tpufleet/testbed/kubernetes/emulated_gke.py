"""The emulated GKE API of a local cluster: its node pools become simulated nodes."""

from __future__ import annotations

import importlib.util
import sys

from tpufleet.errors import BadInput, Conflict
from tpufleet.testbed.kubernetes import processes
from tpufleet.testbed.kubernetes.binaries import Progress
from tpufleet.testbed.kubernetes.cluster_layout import ControlPlaneLayout
from tpufleet.testbed.kubernetes.components import Component
from tpufleet.testbed.kubernetes.control_plane import KubernetesControlPlane
from tpufleet.testbed.kubernetes.processes import ProcessRegistry

COMPONENT = "gke"
PROJECT, LOCATION, CLUSTER, ZONE = "local", "us-central1", "local", "us-central1-a"


def start(plane: KubernetesControlPlane, progress: Progress = lambda message: None) -> None:
    """Idempotent."""
    for package in ("google.cloud.container_v1", "lightkube"):
        if not _is_installed(package):
            raise BadInput(
                f"--gke requires the package {package}; run `pip install 'tpufleet[gke]'`"
            )
    if is_running(plane.layout):
        return
    component = _component(plane.layout)
    registry = ProcessRegistry(plane.layout.folder)
    record = registry.start(component)
    try:
        registry.wait_ready(component, record, None, processes.READY_TIMEOUT)
    except BaseException:
        registry.stop([COMPONENT])
        raise
    progress(f"the emulated GKE API listens on {endpoint(plane.layout)}")


def is_running(layout: ControlPlaneLayout) -> bool:
    records = ProcessRegistry(layout.folder).all()
    return any(record.name == COMPONENT and record.process for record in records)


def endpoint(layout: ControlPlaneLayout) -> str:
    return f"127.0.0.1:{layout.ports['gke']}"


def provisioner_settings(plane: KubernetesControlPlane) -> dict[str, str]:
    """Environment variables with which `tpu provisioner` serves this cluster."""
    return {
        "KUBECONFIG": str(plane.kubeconfig),
        "GKE_ENDPOINT": endpoint(plane.layout),
        "GCP_PROJECT_ID": PROJECT,
        "GCP_CLUSTER_LOCATION": LOCATION,
        "GCP_CLUSTER": CLUSTER,
        "GCP_ZONE": ZONE,
    }


def _component(layout: ControlPlaneLayout) -> Component:
    if "gke" not in layout.ports:
        raise Conflict(
            "the cluster was started by an older version; run `tpu cluster local down`, then "
            "`tpu cluster local up --gke`"
        )
    probes = f"127.0.0.1:{layout.ports['gke_health']}"
    return Component(
        name=COMPONENT,
        argv=(
            sys.executable, "-m", "tpufleet.testbed.gke.main",
            f"--kubeconfig={layout.kubeconfig}",
            f"--listen={endpoint(layout)}",
            f"--probes={probes}",
        ),
        ready_url=f"http://{probes}/readyz",
    )  # fmt: skip


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
