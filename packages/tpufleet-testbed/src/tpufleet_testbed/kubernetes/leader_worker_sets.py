"""Installs LeaderWorkerSet, which is optional, on a running control plane."""

from __future__ import annotations

import time
from typing import Any

from tpufleet_testbed.kubernetes import components, extension_manifests, processes
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
    if any(record.name == COMPONENT and record.process for record in registry.all()):
        return
    started_at = time.monotonic()
    manifests = extension_manifests.leader_worker_set_manifests(plane.build, plane.layout)
    file = plane.layout.folder / "lws-install.yaml"
    file.write_text(extension_manifests.to_yaml(manifests))
    component = components.leader_worker_set_component(plane.layout, plane.build)
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(file))
    plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    record = registry.start(component)
    try:
        registry.wait_ready(component, record, plane.layout.ssl_context(), processes.READY_TIMEOUT)
        plane.wait_until_accepted(PROBE_SET, "leaderworkersets")
    except BaseException:
        registry.stop([COMPONENT])
        raise
    progress(f"LeaderWorkerSet is ready after {time.monotonic() - started_at:.0f} s")
