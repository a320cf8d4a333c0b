"""`/healthz` and `/readyz`, for load balancers and Kubernetes. No token, little said."""

from __future__ import annotations

import logging
from datetime import timedelta

from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response

from tpufleet.clocks import Clock
from tpufleet.errors import FleetError
from tpufleet.model.server_status import CONTROLLER_REPORT
from tpufleet.stores.base import Store

logger = logging.getLogger(__name__)

PATHS = frozenset({"/healthz", "/readyz"})
# The database is asked this often at the most, whoever probes.
CHECK_INTERVAL = timedelta(seconds=2)


class Probes:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._checked: tuple[timedelta, bool] | None = None

    async def respond(self, path: str) -> Response:
        """Healthy: this process responds. Ready: its database responds too."""
        if path == "/healthz" or await self._database_responds():
            return PlainTextResponse("ok\n")
        return PlainTextResponse("the database does not respond\n", status_code=503)

    async def _database_responds(self) -> bool:
        now = self._clock.uptime()
        if self._checked is None or now - self._checked[0] >= CHECK_INTERVAL:
            self._checked = (now, self._checked is None or self._checked[1])  # others need not ask
            self._checked = (now, await run_in_threadpool(self._ask))
        return self._checked[1]

    def _ask(self) -> bool:
        try:
            self._store.metadata(CONTROLLER_REPORT)
        except FleetError as error:
            logger.warning("not ready: %s", error)
            return False
        return True
