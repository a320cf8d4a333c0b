"""`/healthz` and `/readyz`, for load balancers and Kubernetes. No token, little said."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

from starlette.responses import PlainTextResponse, Response

from tpufleet.clocks import Clock
from tpufleet.errors import (
    DatabaseFull,
    DatabaseUnreachable,
    FleetError,
    StorageFull,
    StorageReadOnly,
    StorageUnusable,
)
from tpufleet.model.fleet.server_status import CONTROLLER_REPORT
from tpufleet.service.operations.server_status import write_problem
from tpufleet.service.transport.limits import PROBES
from tpufleet.stores.base import Store

logger = logging.getLogger(__name__)

PROBE_PATHS = frozenset({"/healthz", "/readyz"})
# The database is asked this often at the most, whoever probes.
CHECK_INTERVAL = timedelta(seconds=2)
READY = (200, "ok")
NO_DATABASE = "the database does not respond"
RETRY_AFTER_SECONDS = 5  # of answers with status 503
# They name no file: anyone may ask. The log does.
_UNUSABLE = (
    "the server cannot write its database: nothing new is recorded\n"
    "  next: an admin finds the reason with `tpu status`, or in the server's log"
)
_STORAGE_PROBLEMS = (
    (
        DatabaseFull,
        "the disk of the server's database is full: nothing new is recorded\n"
        "  next: free space on the disk of the database server, or make it larger, then retry",
    ),
    (
        StorageFull,
        "the server's disk is full: nothing new is recorded\n"
        "  next: free space on the disk of its state folder and database, then retry",
    ),
    (
        StorageReadOnly,
        "the server's database is read-only: nothing new is recorded\n"
        "  next: make its file and the file system writable again, then retry",
    ),
    (StorageUnusable, _UNUSABLE),
)


def storage_problem(error: Exception) -> str | None:
    """What a user is told of a storage that cannot be written."""
    return next((text for kind, text in _STORAGE_PROBLEMS if isinstance(error, kind)), None)


class Probes:
    def __init__(self, store: Store, clock: Clock, state: Path) -> None:
        self._store = store
        self._clock = clock
        self._state = state
        self._checked_at: timedelta | None = None
        self._readiness = READY

    async def respond(self, path: str) -> Response:
        """Healthy: this process responds. Ready: its database responds too. A server that cannot
        write says so and stays ready: without it, no heartbeat would be answered."""
        if path == "/healthz":
            return PlainTextResponse("ok\n")
        now = self._clock.uptime()
        if self._checked_at is None or now - self._checked_at >= CHECK_INTERVAL:
            self._checked_at = now  # others need not ask
            self._readiness = await PROBES.run(self._find_readiness)
        status, text = self._readiness
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status == 503 else {}
        return PlainTextResponse(f"{text}\n", status_code=status, headers=headers)

    def _find_readiness(self) -> tuple[int, str]:
        try:
            self._store.metadata(CONTROLLER_REPORT)
        except DatabaseUnreachable as error:  # logged by its store
            logger.debug("not ready: %s", error)
            return 503, NO_DATABASE
        except FleetError as error:
            logger.warning("not ready: %s", error)
            return 503, NO_DATABASE
        problem = write_problem(self._store, self._state)
        if problem is None:
            return READY
        logger.warning("cannot write: %s", problem)
        return 200, f"ok, but {storage_problem(problem) or _UNUSABLE}"
