"""A store in memory, for tests and simulations: SQLite without a file."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from typing import TypeVar

from tpufleet.errors import Unreachable
from tpufleet.stores.base import Store
from tpufleet.stores.sql.database import DatabaseSession
from tpufleet.stores.sql.sqlite import SqliteDatabase, SqliteSession, transact

T = TypeVar("T")


class MemoryStore(Store):
    def __init__(self) -> None:
        super().__init__(_MemoryDatabase())

    def close(self) -> None:
        """Nothing to close: the object may be shared."""


class _MemoryDatabase(SqliteDatabase):
    """One connection, which threads use in turn."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False, cached_statements=256
        )

    def read(self, work: Callable[[DatabaseSession], T]) -> T:
        with self._lock:
            return work(SqliteSession(self._connection))

    def snapshot(self, work: Callable[[DatabaseSession], T]) -> T:
        with self._lock:
            return transact(self._connection, "BEGIN", work)

    def write(self, work: Callable[[DatabaseSession], T], *, durable: bool = True) -> T:
        return self.snapshot(work)

    def write_error(self) -> Unreachable | None:
        return None
