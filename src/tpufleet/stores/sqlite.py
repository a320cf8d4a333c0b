"""SQLite: one file, several threads and several processes."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from tpufleet.errors import FleetError, Unreachable
from tpufleet.stores.database import Row, Session
from tpufleet.stores.sql import SqlStore

T = TypeVar("T")

# Longer than any commit takes; another process that writes is waited for this long.
_BUSY_TIMEOUT = 30.0
_TEMPORARY_ERRORS = {
    "SQLITE_BUSY",
    "SQLITE_LOCKED",
    "SQLITE_FULL",
    "SQLITE_IOERR",
    "SQLITE_CANTOPEN",
}


def open_sqlite(path: Path) -> SqlStore:
    return SqlStore(SqliteDatabase(path))


class SqliteDatabase:
    text_type = "TEXT"
    integer_type = "INTEGER"
    for_update = ""  # whoever writes is alone
    migration_lock = ""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._resting: list[sqlite3.Connection] = []
        self._closed = False
        # Threads queue here, fairly; SQLite's own lock makes waiters sleep and poll.
        self._writing = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Jobs hold environments and users hold hashes: for the owner's eyes only.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))

    def read(self, work: Callable[[Session], T]) -> T:
        return self._with_connection(lambda connection: work(_SqliteSession(connection)))

    def snapshot(self, work: Callable[[Session], T]) -> T:
        return self._with_connection(lambda connection: _transact(connection, "BEGIN", work))

    def write(self, work: Callable[[Session], T]) -> T:
        with self._writing:
            return self._with_connection(
                lambda connection: _transact(connection, "BEGIN IMMEDIATE", work)
            )

    def close(self) -> None:
        self._closed = True
        while self._resting:
            self._resting.pop().close()

    def _with_connection(self, use: Callable[[sqlite3.Connection], T]) -> T:
        if self._closed:
            raise FleetError(f"the store {self._path} is closed")
        try:
            connection = self._take()
            try:
                return use(connection)
            finally:
                self._rest(connection)
        except sqlite3.OperationalError as error:
            name = getattr(error, "sqlite_errorname", "")
            if any(name.startswith(passing) for passing in _TEMPORARY_ERRORS):
                raise Unreachable(f"the database {self._path} does not answer: {error}") from error
            raise

    def _take(self) -> sqlite3.Connection:
        try:
            return self._resting.pop()
        except IndexError:
            return self._connect()

    def _rest(self, connection: sqlite3.Connection) -> None:
        self._resting.append(connection)
        if self._closed:
            self.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path,
            timeout=_BUSY_TIMEOUT,
            isolation_level=None,  # transactions begin where we say
            check_same_thread=False,  # one thread at a time: it is taken and laid back
            cached_statements=256,
        )
        _use_wal(connection)
        # With WAL a power cut may take the last commits, never part of one. A crash takes none.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = OFF")
        return connection


def _use_wal(connection: sqlite3.Connection) -> None:
    """SQLite does not wait for this lock by itself when two processes open a new file at once."""
    deadline = time.monotonic() + _BUSY_TIMEOUT
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _transact(connection: sqlite3.Connection, begin: str, work: Callable[[Session], T]) -> T:
    connection.execute(begin)
    try:
        result = work(_SqliteSession(connection))
        connection.execute("COMMIT")
    except BaseException:
        # Some errors, such as a full disk, have rolled back already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return result


class _SqliteSession:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, statement: str, *parameters: object) -> list[Row]:
        with closing(self._connection.execute(statement, parameters)) as cursor:
            return cursor.fetchall()

    def run(self, statement: str, *parameters: object) -> None:
        self._connection.execute(statement, parameters).close()

    def run_many(self, statement: str, rows: Sequence[Row]) -> None:
        self._connection.executemany(statement, rows).close()
