"""Logs that a database does not respond: once, not for each of the calls that fail meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tpufleet.errors import FleetError

logger = logging.getLogger(__name__)

REPEAT_SECONDS = 60.0


class OutageLog:
    """Of one database, for all threads. Nothing is logged before its first response: whoever opens
    it gets the error."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._responded = False
        self._since: float | None = None  # None: it responds
        self._ended_at = 0.0  # the last outage
        self._logged_at = 0.0
        self._failed_calls = 0

    def failed(self, error: Exception, began_at: float) -> None:
        """A call that began during an outage, and failed when that was over, begins no other."""
        with self._lock:
            if not self._responded or (self._since is None and began_at < self._ended_at):
                return
            now = self._now()
            began = self._since is None
            if self._since is None:
                self._since, self._failed_calls = now, 0
            self._failed_calls += 1
            if not began and now - self._logged_at < REPEAT_SECONDS:
                return
            self._logged_at = now
            seconds, calls = now - self._since, self._failed_calls
        logger.warning(
            "the database does not respond; retrying (%.0f s, %s calls failed): %s",
            seconds,
            calls,
            error,
        )

    def succeeded(self) -> None:
        if self._responded and self._since is None:
            return
        with self._lock:
            since, calls = self._since, self._failed_calls
            self._responded, self._since = True, None
            self._ended_at = self._now()
            seconds = self._ended_at - since if since is not None else 0.0
        if since is not None:
            logger.warning("the database responds again (%.0f s, %s calls failed)", seconds, calls)


def unavailable(name: str, error: object) -> str:
    return f"database{name} is unavailable: {error}"


def closed() -> FleetError:
    return FleetError("the store is closed")
