"""Maintenance that Google announces up to seven days ahead. Only v2alpha1 of the API has it, as
`upcoming_maintenance` of a node (cloud.google.com/tpu/docs/view-maintenance-notifications)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from google.api_core import exceptions as google
from google.auth import exceptions as auth

from tpufleet.providers.tpu_vm import api

log = logging.getLogger(__name__)

# Announced days ahead, so rarely is enough.
CHECK_INTERVAL = timedelta(minutes=10)
DEADLINE = 10.0


def connect(endpoint: str = "") -> Any:
    from google.cloud import tpu_v2alpha1

    return api.connect(endpoint, tpu_v2alpha1)


class MaintenanceWindows:
    """Of one zone. A failure is logged and retried: the windows are a courtesy, and agents report
    maintenance that begins."""

    def __init__(self, parent: str, connect: Callable[[], Any]) -> None:
        self._parent = parent
        self._connect = connect
        self._client: Any = None
        self._checked_at: datetime | None = None
        self._starts: dict[str, datetime] = {}  # by name of the node

    def refresh(self, now: datetime) -> None:
        """Ask again if the last answer is old. Call it only where nodes exist."""
        if self._checked_at is not None and now - self._checked_at < CHECK_INTERVAL:
            return
        self._checked_at = now
        try:
            if self._client is None:
                self._client = self._connect()
            nodes = self._client.list_nodes(parent=self._parent, timeout=DEADLINE, retry=None)
            starts = {node.name: _start(node.upcoming_maintenance) for node in nodes}
        except (google.GoogleAPIError, auth.GoogleAuthError, ImportError) as error:
            log.warning("cannot read upcoming maintenance in %s: %s", self._parent, error)
            return
        self._starts = {name: start for name, start in starts.items() if start is not None}

    def start_of(self, node: str) -> datetime | None:
        return self._starts.get(node)


def _start(window: Any) -> datetime | None:
    text = getattr(window, "window_start_time", "")
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
