"""Notifications of other servers: LISTEN on a connection of its own, in a thread.

A notification only says that there may be something new. While none arrive, callers poll.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from tpufleet.backoff import Backoff
from tpufleet.errors import Unreachable
from tpufleet.stores.records import StoreChange
from tpufleet.stores.sql.database import DatabaseSession

if TYPE_CHECKING:
    import psycopg

logger = logging.getLogger(__name__)

# Of this schema: several fleets may share a database. Names have at most 63 bytes.
CHANNEL = "left('tpufleet:' || current_schema(), 63)"
CHANNEL_NAME = f"SELECT {CHANNEL}"
NOTIFY = f"SELECT pg_notify({CHANNEL}, ?)"
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.2, 5.0
_CHANGES = {change.value: change for change in StoreChange}


class PostgresListener:
    """`connected`: notifications arrive. False while a caller must poll."""

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection],
        session: Callable[[psycopg.Connection], DatabaseSession],
        on_change: Callable[[StoreChange], None],
        test_seconds: float,
    ) -> None:
        self._connect = connect
        self._session = session  # fails when the database does not respond in time
        self._on_change = on_change
        self._test_seconds = test_seconds
        self._test = f"test {secrets.token_hex(8)}"
        self._stopping = threading.Event()
        self.connected = False
        self._thread = threading.Thread(target=self._run, name="postgres listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The thread ends by itself, within seconds."""
        self._stopping.set()

    def _run(self) -> None:
        backoff = Backoff(first=_FIRST_RETRY_SECONDS, longest=_LONGEST_RETRY_SECONDS)
        while not self._stopping.is_set():
            try:
                with contextlib.closing(self._connect()) as connection:
                    self._listen(connection, backoff)
            except Exception as error:
                if self.connected or not backoff.failures:
                    logger.warning("no notifications from the database; polling: %s", error)
                self.connected = False
                self._stopping.wait(backoff.failed())
        self.connected = False

    def _listen(self, connection: psycopg.Connection, backoff: Backoff) -> None:
        session = self._session(connection)
        channel = session.rows(CHANNEL_NAME)[0][0].replace('"', '""')
        session.run(f'LISTEN "{channel}"')
        while not self._stopping.is_set():
            session.rows(NOTIFY, self._test)
            arrived = False
            for notification in connection.notifies(timeout=self._test_seconds):
                if notification.payload == self._test:
                    arrived = True
                    backoff.succeeded()
                    self._start()
                elif notification.payload in _CHANGES:
                    self._on_change(_CHANGES[notification.payload])
                if self._stopping.is_set():
                    return
            if not arrived:
                raise Unreachable(f"none arrived within {self._test_seconds:g} s")

    def _start(self) -> None:
        if not self.connected:
            self.connected = True
            for change in StoreChange:  # what was added before was not announced
                self._on_change(change)
