"""The emulated GKE API of a local cluster: its node pools become simulated nodes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tpufleet_testbed.kubernetes.binaries import Progress
from tpufleet_testbed.kubernetes.cluster_layout import ControlPlaneLayout
from tpufleet_testbed.kubernetes.components import Component
from tpufleet_testbed.kubernetes.control_plane import KubernetesControlPlane
from tpufleet_testbed.kubernetes.processes import ProcessRegistry

if TYPE_CHECKING:
    from tpufleet_testbed.gke.fault_plan import GkeFaultPlan

COMPONENT = "gke"
PROJECT, CLUSTER, ZONE = "local", "local", "us-central1-a"
PLAN = "gke-plan.yaml"  # in the folder of the cluster: a link to the user's file


def start(
    plane: KubernetesControlPlane,
    progress: Progress = lambda message: None,
    plan: Path | None = None,
) -> None:
    """Idempotent. `plan` is a fault plan, read again whenever it changes."""
    if is_running(plane.layout):
        return
    link = plane.layout.folder / PLAN
    link.unlink(missing_ok=True)
    if plan is not None:
        load_plan(plan)
        link.symlink_to(plan.absolute())
    with ProcessRegistry(plane.layout.folder).launch(_component(plane.layout)):
        progress(f"the emulated GKE API listens on {endpoint(plane.layout)}")


def load_plan(plan: Path) -> GkeFaultPlan:
    """BadInput when it is not valid. Imports Google's client."""
    from tpufleet_testbed.gke import fault_plan

    return fault_plan.load(plan)


def is_running(layout: ControlPlaneLayout) -> bool:
    return ProcessRegistry(layout.folder).is_running(COMPONENT)


def endpoint(layout: ControlPlaneLayout) -> str:
    return f"127.0.0.1:{layout.ports['gke']}"


def provisioner_settings(plane: KubernetesControlPlane) -> dict[str, str]:
    """Environment variables with which `tpu provisioner` serves this cluster."""
    zones = _zones(plane.layout)
    return {
        "KUBECONFIG": str(plane.kubeconfig),
        "GKE_ENDPOINT": endpoint(plane.layout),
        "GCP_PROJECT_ID": PROJECT,
        "GCP_CLUSTER_LOCATION": _region(zones[0]),
        "GCP_CLUSTER": CLUSTER,
        **({"GCP_ZONE": zones[0]} if len(zones) == 1 else {"GCP_ZONES": ",".join(zones)}),
    }


def _zones(layout: ControlPlaneLayout) -> tuple[str, ...]:
    plan = layout.folder / PLAN
    return load_plan(plan).zones if plan.is_symlink() else (ZONE,)


def _region(zone: str) -> str:
    return zone.rpartition("-")[0]


def _component(layout: ControlPlaneLayout) -> Component:
    probes, plan = f"127.0.0.1:{layout.ports['gke_health']}", layout.folder / PLAN
    location = _region(_zones(layout)[0])
    return Component(
        name=COMPONENT,
        argv=(
            sys.executable, "-m", "tpufleet_testbed.gke.main",
            f"--kubeconfig={layout.kubeconfig}",
            f"--listen={endpoint(layout)}",
            f"--probes={probes}",
            f"--cluster=projects/{PROJECT}/locations/{location}/clusters/{CLUSTER}",
            *([f"--plan={plan}"] if plan.is_symlink() else []),
        ),
        ready_url=f"http://{probes}/readyz",
    )  # fmt: skip
