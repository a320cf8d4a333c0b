"""LeaderWorkerSet on a control plane that runs: only where somebody asks for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tpufleet.testbed.kubernetes import components, extension_manifests, processes
from tpufleet.testbed.kubernetes.binaries import Progress
from tpufleet.testbed.kubernetes.processes import ProcessRegistry

if TYPE_CHECKING:
    from tpufleet.testbed.kubernetes.control_plane import ControlPlane

COMPONENT = "lws"
# One as small as can be, which is never made.
FIRST: dict[str, Any] = {
    "apiVersion": "leaderworkerset.x-k8s.io/v1",
    "kind": "LeaderWorkerSet",
    "metadata": {"name": "first", "namespace": "default"},
    "spec": {"leaderWorkerTemplate": {"size": 1, "workerTemplate": {"spec": {
        "containers": [{"name": "c", "image": "none"}],
    }}}},
}  # fmt: skip


def install(plane: ControlPlane, progress: Progress = lambda words: None) -> None:
    """Asking twice is no harm."""
    ledger = ProcessRegistry(plane.layout.folder)
    if any(one.name == COMPONENT and one.process for one in ledger.all()):
        return
    began = time.monotonic()
    install = plane.layout.folder / "lws-install.yaml"
    install.write_text(
        extension_manifests.to_yaml(
            extension_manifests.leader_worker_set_manifests(plane.build, plane.layout)
        )
    )
    part = components.leader_worker_set_component(plane.layout, plane.build)
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(install))
    plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    running = ledger.start(part)
    try:
        ledger.wait_ready(part, running, plane.layout.ssl_context(), processes.READY_WITHIN)
        plane.wait_until_accepted(FIRST, "leaderworkersets")
    except BaseException:
        ledger.stop([COMPONENT])
        raise
    progress(f"LeaderWorkerSet is ready after {time.monotonic() - began:.0f} s")
