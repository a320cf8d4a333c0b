"""A real server, bridges, the Firestore emulator, and Google's client as the user."""

from __future__ import annotations

import contextlib
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

from google.api_core import exceptions, retry
from google.auth.credentials import AnonymousCredentials
from google.cloud import firestore

from tests.firestore.firestore_emulator import FirestoreEmulator
from tests.server_process import Server, wait_until
from tpufleet.errors import FleetError
from tpufleet.model.fleet.pools import Pool

PROJECT = "demo-tpufleet"
POOL = "web"
# The user nobody may be unable to run the Python of a checkout.
ROOT_OPTIONS = ("--allow-root",) if os.geteuid() == 0 else ()
# On a machine that stands still for a minute the emulator gives calls up.
PATIENCE = retry.Retry(
    predicate=retry.if_exception_type(
        exceptions.Cancelled, exceptions.DeadlineExceeded, exceptions.ServiceUnavailable
    ),
    timeout=900,
)
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
        self.statuses: dict[str, list[str]] = defaultdict(list)  # as a listener observed them
        self._lock = threading.Lock()
        self._watch = self.documents.on_snapshot(self._on_snapshot)

    def _on_snapshot(self, snapshots: Any, changes: Any, at: Any) -> None:
        with self._lock:
            for change in changes:
                status = (change.document.to_dict() or {}).get("status")
                observed = self.statuses[change.document.id]
                if change.type.name != "REMOVED" and (not observed or observed[-1] != status):
                    observed.append(status)

    def keep_listening(self) -> None:
        """The emulator gives listeners up, too."""
        if not self._watch.is_active:
            self._watch = self.documents.on_snapshot(self._on_snapshot)

    # As the user

    def add(self, source: str, /, **fields: Any) -> str:
        document = {
            "challenge_number": 3,
            "code": source,
            "timeout": 600,
            "status": "pending",
            "created_at": firestore.SERVER_TIMESTAMP,
            "metadata": {"submitted_by": "ada"},
            **fields,
        }
        self.keep_listening()
        reference = self.documents.document()
        given = {name: value for name, value in document.items() if value is not None}
        with contextlib.suppress(exceptions.AlreadyExists):  # an earlier try did it
            reference.create(given, retry=PATIENCE)
        return reference.id

    def get(self, document_id: str) -> dict[str, Any]:
        return self.documents.document(document_id).get(retry=PATIENCE).to_dict()

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
        """All statuses that the user's listener observed, once the document has ended."""
        observed = self.statuses[document_id]

        def ended() -> bool:
            self.keep_listening()
            return bool(observed) and observed[-1] in ENDED

        wait_until(ended, 120, lambda: f"{document_id}: {observed}")
        return observed

    # Bridges

    def start_bridge(self, *options: str) -> subprocess.Popen[bytes]:
        with (self.folder / "bridge.log").open("ab") as log:
            bridge = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tpufleet", "--server", self.server.url),
                    *("bridge", "firestore", "--project", PROJECT, "--collection", self._name),
                    *("--accelerator", "v5e-1", "--pool", POOL, "--python", "python"),
                    *("--heartbeat", "2", *ROOT_OPTIONS, *options),
                ],
                env={
                    **os.environ,
                    "TPUFLEET_HOME": str(self.server.home),
                    "TPUFLEET_CONFIG": os.devnull,
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
            bridge.send_signal(signal.SIGUSR1)  # dumps the traceback of its threads
        time.sleep(3 if self.bridges else 0)  # the machine may be busy
        path = self.folder / "bridge.log"
        log_lines = path.read_text().splitlines()[-200:] if path.exists() else []
        exits = [f"bridge {bridge.pid} ended: {bridge.poll()}" for bridge in self.bridges]
        documents = [f"{one.id} {one.to_dict()}" for one in self.documents.stream(retry=PATIENCE)]
        return "\n".join([*log_lines, *exits, *documents, *self._jobs(), self.server.log_tail()])

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
