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

from tpufleet.errors import FleetError, StorageFull, Unreachable
from tpufleet.stores.database import DatabaseSession, Row
from tpufleet.stores.sql import SqlStore

T = TypeVar("T")

# Longer than any commit takes; how long to wait for another process that writes.
_BUSY_TIMEOUT = 30.0
# What is acknowledged survives a power cut: each commit waits for the disk. Without that, a power
# cut may lose the last commits but never part of one.
_SYNC_AT_COMMIT = "PRAGMA synchronous = FULL"
_SYNC_LATER = "PRAGMA synchronous = NORMAL"
# Prefixes: extended names such as SQLITE_BUSY_SNAPSHOT count too.
_TEMPORARY_ERRORS = (
    "SQLITE_BUSY",
    "SQLITE_LOCKED",
    "SQLITE_FULL",
    "SQLITE_IOERR",
    "SQLITE_CANTOPEN",
)


def open_sqlite(path: Path) -> SqlStore:
    return SqlStore(SqliteDatabase(path))


class SqliteDatabase:
    text_type = "TEXT"
    integer_type = "INTEGER"
    clustered = "WITHOUT ROWID"
    for_update = ""  # there is only one writer
    columns = (
        "SELECT tables.name, columns.name FROM sqlite_master AS tables "
        "JOIN pragma_table_info(tables.name) AS columns "
        "WHERE tables.type = 'table' ORDER BY tables.name, columns.cid"
    )
    migration_lock = ""
    time_in_micros = ""  # the clock of this machine

    def __init__(self, path: Path) -> None:
        self._path = path
        self._idle: list[sqlite3.Connection] = []
        self._closed = False
        # Threads queue here in order; SQLite's own lock makes waiters sleep and poll.
        self._write_lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Contains environments and token hashes: readable only by the owner.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))

    def read(self, work: Callable[[DatabaseSession], T]) -> T:
        return self._with_connection(lambda connection: work(_SqliteSession(connection)))

    def snapshot(self, work: Callable[[DatabaseSession], T]) -> T:
        return self._with_connection(lambda connection: _transact(connection, "BEGIN", work))

    def write(self, work: Callable[[DatabaseSession], T], *, durable: bool = True) -> T:
        def use(connection: sqlite3.Connection) -> T:
            if durable:
                return _transact(connection, "BEGIN IMMEDIATE", work)
            connection.execute(_SYNC_LATER)
            try:
                return _transact(connection, "BEGIN IMMEDIATE", work)
            finally:
                connection.execute(_SYNC_AT_COMMIT)

        with self._write_lock:
            return self._with_connection(use)

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _with_connection(self, use: Callable[[sqlite3.Connection], T]) -> T:
        if self._closed:
            raise FleetError(f"store {self._path} is closed")
        try:
            connection = self._acquire()
            try:
                return use(connection)
            finally:
                self._release(connection)
        except sqlite3.OperationalError as error:
            name = getattr(error, "sqlite_errorname", "")
            if name == "SQLITE_FULL":
                raise StorageFull(f"database {self._path}: {error}") from error
            if name.startswith(_TEMPORARY_ERRORS):
                raise Unreachable(f"database {self._path} is unavailable: {error}") from error
            raise

    def _acquire(self) -> sqlite3.Connection:
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect()

    def _release(self, connection: sqlite3.Connection) -> None:
        self._idle.append(connection)
        if self._closed:
            self.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path,
            timeout=_BUSY_TIMEOUT,
            isolation_level=None,  # transactions are explicit
            check_same_thread=False,  # used by one thread at a time
            cached_statements=256,
        )
        _use_wal(connection)
        connection.execute(_SYNC_AT_COMMIT)
        connection.execute("PRAGMA foreign_keys = OFF")
        return connection


def _use_wal(connection: sqlite3.Connection) -> None:
    """SQLite does not retry this by itself when two processes open a new file at once."""
    deadline = time.monotonic() + _BUSY_TIMEOUT
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _transact(
    connection: sqlite3.Connection, begin: str, work: Callable[[DatabaseSession], T]
) -> T:
    connection.execute(begin)
    try:
        result = work(_SqliteSession(connection))
        connection.execute("COMMIT")
    except BaseException:
        # Some errors, such as a full disk, roll back by themselves.
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
