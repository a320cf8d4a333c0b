"""Google's own Firestore emulator on a free port, and why it cannot be had where it cannot."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from tests.server_process import wait_until
from tpufleet.testbed.kubernetes import cluster_layout

STARTS_WITHIN = 90.0  # seconds; Java on a busy machine


def missing_reason() -> str | None:
    """Why there is no emulator on this machine, and how to get it; None: there is one."""
    if shutil.which("gcloud") is None:
        return "no gcloud; install the Google Cloud CLI with google-cloud-cli-firestore-emulator"
    if shutil.which("java") is None:
        return "no Java, which the Firestore emulator runs on; install openjdk-17-jre-headless"
    return None


class FirestoreEmulator:
    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{cluster_layout.free_ports(1)[0]}"
        self._log = folder / "emulator.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["gcloud", "emulators", "firestore", "start", f"--host-port={self.address}"],
                env={**os.environ, "CLOUDSDK_CONFIG": str(folder / "gcloud")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self._answers, STARTS_WITHIN, self._log.read_text)

    def _answers(self) -> bool:
        said = self._log.read_text(errors="replace")
        assert self._process.poll() is None, said
        return "is now running" in said

    def stop(self) -> None:
        """With Java, which would outlive gcloud."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
