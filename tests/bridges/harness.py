"""A real control plane, real bridges, the real emulator, and Google's client on the user's side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from google.auth.credentials import AnonymousCredentials
from google.cloud import firestore

from tests.bridges.firestore_emulator import FirestoreEmulator
from tests.server_process import Server, wait_until
from tpufleet.errors import FleetError
from tpufleet.model.pools import Pool

PROJECT = "demo-tpufleet"
POOL = "web"
ENDED = ("completed", "failed")
ORDER = ("pending", "scheduled", "running", "completed", "failed")


class BridgeHarness:
    def __init__(
        self, folder: Path, server: Server, emulator: FirestoreEmulator, collection: str
    ) -> None:
        self.server = server
        self.folder = folder
        self._emulator = emulator
        self._name = collection
        self.user = firestore.Client(project=PROJECT, credentials=AnonymousCredentials())
        self.documents = self.user.collection(collection)
        self.bridges: list[subprocess.Popen[bytes]] = []
        self.statuses: dict[str, list[str]] = defaultdict(list)  # as a listener saw them
        self._seen = threading.Lock()
        self._watch = self.documents.on_snapshot(self._see)

    def _see(self, snapshots: Any, changes: Any, at: Any) -> None:
        with self._seen:
            for change in changes:
                status = (change.document.to_dict() or {}).get("status")
                told = self.statuses[change.document.id]
                if change.type.name != "REMOVED" and (not told or told[-1] != status):
                    told.append(status)

    # The user's part.

    def add(self, source: str, /, **fields: Any) -> str:
        document = {
            "challenge_number": 3,
            "code": source,
            "timeout": 60,
            "status": "pending",
            "created_at": firestore.SERVER_TIMESTAMP,
            "metadata": {"submitted_by": "ada"},
            **fields,
        }
        reference = self.documents.document()
        reference.set({name: value for name, value in document.items() if value is not None})
        return reference.id

    def get(self, document_id: str) -> dict[str, Any]:
        return self.documents.document(document_id).get().to_dict()

    def wait_ended(self, document_id: str, within: float = 180.0) -> dict[str, Any]:
        return wait_until(
            lambda: found if (found := self.get(document_id))["status"] in ENDED else None,
            within,
            self.diagnostics,
        )

    def wait_status(self, document_id: str, status: str, within: float = 60.0) -> dict[str, Any]:
        return wait_until(
            lambda: found if (found := self.get(document_id))["status"] == status else None,
            within,
            self.diagnostics,
        )

    def observed_statuses(self, document_id: str) -> list[str]:
        """The statuses that the user's listener was told, up to the last."""
        told = self.statuses[document_id]
        wait_until(lambda: told and told[-1] in ENDED, 120, lambda: f"{document_id}: {told}")
        return told

    # The bridges.

    def start_bridge(self, *options: str) -> subprocess.Popen[bytes]:
        with (self.folder / "bridge.log").open("ab") as log:
            bridge = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tpufleet", "--server", self.server.url),
                    *("bridge", "firestore", "--project", PROJECT, "--collection", self._name),
                    *("--accelerator", "v5e-1", "--pool", POOL, "--python", "python"),
                    *("--beat", "2", *options),
                ],
                env={
                    **os.environ,
                    "TPUFLEET_HOME": str(self.server.home),
                    "TPUFLEET_CONFIG": str(self.server.home / "none.yaml"),
                    "FIRESTORE_EMULATOR_HOST": self._emulator.address,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.bridges.append(bridge)
        return bridge

    def kill(self, bridge: subprocess.Popen[bytes]) -> None:
        bridge.send_signal(signal.SIGKILL)
        bridge.wait()
        self.bridges.remove(bridge)

    def close(self) -> None:
        self._watch.unsubscribe()
        for bridge in list(self.bridges):
            self.kill(bridge)

    def diagnostics(self) -> str:
        for bridge in self.bridges:
            bridge.send_signal(signal.SIGUSR1)  # it writes down where its threads stand
        time.sleep(3 if self.bridges else 0)  # the machine may be busy
        path = self.folder / "bridge.log"
        said = path.read_text().splitlines()[-200:] if path.exists() else []
        stand = [f"bridge {bridge.pid} ended: {bridge.poll()}" for bridge in self.bridges]
        documents = [f"{each.id} {each.to_dict()}" for each in self.documents.stream()]
        return "\n".join([*said, *stand, *documents, *self._jobs(), self.server.log_tail()])

    def _jobs(self) -> list[str]:
        try:
            rows = self.server.client.jobs(limit=20).jobs
        except FleetError as error:
            return [str(error)]
        return [f"{row.id} {row.state} {row.reason}" for row in rows]


def create_pool(server: Server, slices: int) -> None:
    server.client.put_pool(
        Pool(
            name=POOL,
            accelerator="v5litepod-1",
            provider="local",
            smallest=slices,
            largest=slices,
            idle_after=timedelta(hours=1),
        )
    )
