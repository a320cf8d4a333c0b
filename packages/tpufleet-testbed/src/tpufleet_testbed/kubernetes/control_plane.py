"""A running control plane, as its administrator sees it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpufleet.errors import FleetError
from tpufleet_testbed.kubernetes import programs
from tpufleet_testbed.kubernetes.binaries import Build
from tpufleet_testbed.kubernetes.cluster_layout import ControlPlaneLayout
from tpufleet_testbed.kubernetes.processes import READY_TIMEOUT, ComponentNotReady

POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesControlPlane:
    layout: ControlPlaneLayout
    build: Build

    @property
    def kubeconfig(self) -> Path:
        return self.layout.kubeconfig

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        """Output of kubectl. FleetError with its error output if it fails."""
        argv = [self.build.harness, "kubectl", f"--kubeconfig={self.kubeconfig}", *args]
        return programs.run(f"kubectl {args[0]}", argv, input=(stdin or "").encode())

    def install(self, manifests: Path) -> None:
        """Apply a file with CRDs, and wait until they are established."""
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(manifests))
        self.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")

    def wait_until_accepted(self, manifest: dict[str, Any], kinds: str) -> None:
        """Wait until a dry-run create of `manifest` succeeds and `kinds` can be listed.

        Ready components are not enough: the API server may still fail to reach a webhook, and it
        lists new kinds before it serves them."""
        deadline = time.monotonic() + READY_TIMEOUT
        while True:
            try:
                self.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest))
                self.kubectl("get", kinds, "--all-namespaces")
                return
            except FleetError as error:
                if time.monotonic() > deadline:
                    raise ComponentNotReady(
                        f"the API server did not accept a {manifest['kind']} "
                        f"within {READY_TIMEOUT:g} s: {error}"
                    ) from error
                time.sleep(POLL_SECONDS)
