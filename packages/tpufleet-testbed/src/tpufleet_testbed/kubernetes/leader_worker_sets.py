"""Installs LeaderWorkerSet, which is optional, on a running control plane."""

from __future__ import annotations

import time
from typing import Any

from tpufleet_testbed.kubernetes import components, extension_manifests
from tpufleet_testbed.kubernetes.binaries import Progress
from tpufleet_testbed.kubernetes.control_plane import KubernetesControlPlane
from tpufleet_testbed.kubernetes.processes import ProcessRegistry

COMPONENT = "lws"
# A minimal LeaderWorkerSet, only used in a dry run.
PROBE_SET: dict[str, Any] = {
    "apiVersion": "leaderworkerset.x-k8s.io/v1",
    "kind": "LeaderWorkerSet",
    "metadata": {"name": "probe", "namespace": "default"},
    "spec": {"leaderWorkerTemplate": {"size": 1, "workerTemplate": {"spec": {
        "containers": [{"name": "c", "image": "none"}],
    }}}},
}  # fmt: skip


def install(plane: KubernetesControlPlane, progress: Progress = lambda message: None) -> None:
    """Idempotent."""
    registry = ProcessRegistry(plane.layout.folder)
    if registry.is_running(COMPONENT):
        return
    started_at = time.monotonic()
    manifests = extension_manifests.leader_worker_set_manifests(plane.build, plane.layout)
    file = plane.layout.folder / "lws-install.yaml"
    file.write_text(extension_manifests.to_yaml(manifests))
    plane.install(file)
    component = components.extension(plane.build, plane.layout, COMPONENT)
    with registry.launch(component, plane.layout.ssl_context()):
        plane.wait_until_accepted(PROBE_SET, "leaderworkersets")
    progress(f"LeaderWorkerSet is ready after {time.monotonic() - started_at:.0f} s")
