"""Google's Firestore emulator on a free port, or the reason why it is not available."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from tests.server_process import wait_until
from tpufleet_testbed.kubernetes import cluster_layout

START_TIMEOUT = 90.0  # seconds; Java on a busy machine


def missing_reason() -> str | None:
    """What is missing to run the emulator, and how to install it; None when it can run."""
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
        wait_until(self._is_ready, START_TIMEOUT, self._log.read_text)

    def _is_ready(self) -> bool:
        output = self._log.read_text(errors="replace")
        assert self._process.poll() is None, output
        return "is now running" in output

    def stop(self) -> None:
        """Kill the process group: Java would outlive gcloud."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
