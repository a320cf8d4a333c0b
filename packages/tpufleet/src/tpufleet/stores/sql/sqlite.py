"""SQLite: one file, several threads and several processes."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

from tpufleet import disk_space
from tpufleet.errors import (
    DatabaseUnreachable,
    StorageFull,
    StorageReadOnly,
    StorageUnusable,
    Unreachable,
)
from tpufleet.stores.records import StoreChange, Subscription
from tpufleet.stores.sql.database import DatabaseSession, NoNotifications, Query, Row
from tpufleet.stores.sql.outage_log import OutageLog, closed, unavailable

T = TypeVar("T")

# Longer than any commit takes; how long to wait for another process that writes.
_BUSY_TIMEOUT = 30.0
# What is acknowledged survives a power cut: each commit waits for the disk. Without that, a power
# cut may lose the last commits but never part of one.
_SYNC_AT_COMMIT = "PRAGMA synchronous = FULL"
_SYNC_LATER = "PRAGMA synchronous = NORMAL"
# Seconds between two checkpoints by background writes: commits wait for the disk meanwhile.
CHECKPOINT_INTERVAL = 4.0
# Of 4 KiB. A server without them checkpoints when its log has this many.
_MAX_LOG_PAGES = 10_000
# Prefixes: extended names such as SQLITE_BUSY_SNAPSHOT count too.
_TEMPORARY_ERRORS = (
    "SQLITE_BUSY",
    "SQLITE_LOCKED",
    "SQLITE_FULL",
    "SQLITE_IOERR",
    "SQLITE_CANTOPEN",
)
_READ_ONLY = (
    "is read-only\n"
    "  next: make its file and the file system writable again; the server then continues"
)
_DAMAGED = "is damaged\n  next: stop the server and restore a backup with `tpu backup restore`"
_UNUSABLE_ERRORS: dict[str, tuple[type[StorageUnusable], str]] = {
    "SQLITE_READONLY": (StorageReadOnly, _READ_ONLY),
    "SQLITE_CORRUPT": (StorageUnusable, _DAMAGED),
    "SQLITE_NOTADB": (StorageUnusable, _DAMAGED),
}


@cache
def _has_trigrams() -> bool:
    """Whether this SQLite has the extension FTS5 with its tokenizer for parts of words."""
    with closing(sqlite3.connect(":memory:")) as connection:
        try:
            connection.execute("CREATE VIRTUAL TABLE test USING fts5 (words, tokenize = 'trigram')")
        except sqlite3.OperationalError:
            return False
    return True


class SqliteDatabase:
    text_type = "TEXT"
    integer_type = "INTEGER"
    background_batch = 50  # two milliseconds
    clustered = "WITHOUT ROWID"
    for_update = ""  # there is only one writer
    columns = (
        "SELECT tables.name, columns.name FROM sqlite_master AS tables "
        "JOIN pragma_table_info(tables.name) AS columns "
        "WHERE tables.type = 'table' ORDER BY tables.name, columns.cid"
    )
    migration_lock = ""
    unit_separator = "char(31)"
    joined = "group_concat({column}, char(30))"
    heartbeat_rows = (
        "SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), "
        "json_extract(value, '$[2]'), json_extract(value, '$[3]') FROM json_each(?) WHERE true"
    )
    # Words that were changed stay in the index. What it gives is compared with the words of today.
    word_index: Sequence[str] = (
        ()
        if not _has_trigrams()
        else (
            "CREATE VIRTUAL TABLE job_words USING fts5 "
            "(job_id UNINDEXED, words, tokenize = 'trigram', detail = 'none', columnsize = 0)",
            "CREATE TRIGGER job_words_of_new AFTER INSERT ON job_search WHEN NEW.state <> '' BEGIN "
            "INSERT INTO job_words (job_id, words) VALUES (NEW.job_id, NEW.words); END",
            "CREATE TRIGGER job_words_of_changed AFTER UPDATE ON job_search WHEN NEW.state <> '' "
            "AND (OLD.state = '' OR OLD.words <> NEW.words) BEGIN "
            "INSERT INTO job_words (job_id, words) VALUES (NEW.job_id, NEW.words); END",
        )
    )
    time_in_micros = ""  # the clock of this machine

    def __init__(self, path: Path, checkpoint_interval: float = CHECKPOINT_INTERVAL) -> None:
        self._path = path
        self._checkpoint_interval = checkpoint_interval
        self._idle: list[sqlite3.Connection] = []
        self._closed = False
        self._has_log = False
        self._write_error: Unreachable | None = None
        self._outages = OutageLog()
        # Threads queue here in order; SQLite's own lock makes waiters sleep and poll.
        self._write_lock = _FairLock()
        self._checkpointed_at = time.monotonic()
        try:
            self._identity = _create(path)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            raise StorageReadOnly(
                f"database {path} cannot be written: {error.strerror}\n"
                "  next: make its file, its folder and the file system writable, and start again"
            ) from error

    def read(self, work: Callable[[DatabaseSession], T]) -> T:
        return self._with_connection(lambda connection: work(SqliteSession(connection)))

    def snapshot(self, work: Callable[[DatabaseSession], T]) -> T:
        return self._with_connection(lambda connection: transact(connection, "BEGIN", work))

    def write(self, work: Callable[[DatabaseSession], T], *, durable: bool = True) -> T:
        def use(connection: sqlite3.Connection) -> T:
            if durable:
                return transact(connection, "BEGIN IMMEDIATE", work)
            connection.execute(_SYNC_LATER)
            try:
                return transact(connection, "BEGIN IMMEDIATE", work)
            finally:
                connection.execute(_SYNC_AT_COMMIT)

        try:
            with self._write_lock:
                result = self._with_connection(use, written=True)
        except Unreachable as error:
            self._write_error = error
            raise
        self._write_error = None
        if not durable:
            self._checkpoint()
        return result

    def write_error(self) -> Unreachable | None:
        if self._write_error is None and disk_space.is_full(self._path.parent):
            return self._full(os.strerror(errno.ENOSPC))
        return self._write_error

    def _full(self, problem: object) -> StorageFull:
        return StorageFull(f"database {self._path}: {problem}")

    def _checkpoint(self) -> None:
        """Move what was committed from the log to the database, while others write. Otherwise a
        durable commit does so from time to time, and its caller waits."""
        now = time.monotonic()
        if now - self._checkpointed_at >= self._checkpoint_interval:
            self._checkpointed_at = now
            self._with_connection(
                lambda connection: connection.execute("PRAGMA wal_checkpoint(PASSIVE)").close()
            )

    @cached_property
    def word_matches(self) -> str:
        """The database may be from a machine without the index."""
        known = "SELECT 1 FROM sqlite_master WHERE name = 'job_words'"
        if not self.read(lambda session: session.rows(known)):
            return ""
        return "SELECT job_id FROM job_words WHERE job_words MATCH ?"

    def word_query(self, grams: Sequence[str]) -> str:
        quoted = (gram.replace('"', '""') for gram in grams)
        return " AND ".join(f'"{gram}"' for gram in quoted)

    def listen(self, on_change: Callable[[StoreChange], None]) -> Subscription:
        return NoNotifications()

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _with_connection(
        self, use: Callable[[sqlite3.Connection], T], *, written: bool = False
    ) -> T:
        if self._closed:
            raise closed()
        began_at = time.monotonic()
        try:
            connection = self._acquire()
            try:
                result = use(connection)
                if written:
                    self._require_files()  # while the connection keeps its log
                self._outages.succeeded()
                return result
            finally:
                self._release(connection)
        except sqlite3.DatabaseError as error:
            name = getattr(error, "sqlite_errorname", "")
            for prefix, (kind, problem) in _UNUSABLE_ERRORS.items():
                if name.startswith(prefix):
                    raise kind(f"database {self._path} {problem}: {error}") from error
            if name == "SQLITE_FULL":
                raise self._full(error) from error
            if name.startswith(_TEMPORARY_ERRORS):
                outage = DatabaseUnreachable(unavailable(f" {self._path}", error))
                self._outages.failed(outage, began_at)
                raise outage from error
            raise

    def _require_files(self) -> None:
        """What is written to files that were deleted is gone when the server ends: SQLite does not
        notice, and it must not be acknowledged."""
        try:
            same = _identity(os.stat(self._path)) == self._identity
            if self._has_log:
                os.stat(f"{self._path}-wal")
        except FileNotFoundError:
            same = False
        if not same:
            raise StorageUnusable(
                f"database {self._path} was deleted or replaced while the server runs; what is "
                "submitted is not accepted\n"
                "  next: put it back, or run `tpu backup restore`, and restart the server"
            )

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
        self._has_log = _use_wal(connection)
        connection.execute(_SYNC_AT_COMMIT)
        connection.execute(f"PRAGMA wal_autocheckpoint = {_MAX_LOG_PAGES}")
        connection.execute("PRAGMA foreign_keys = OFF")
        return connection


class _FairLock:
    """Passes from thread to thread in the order in which they came: one that writes in many small
    steps does not get it again before those that wait."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False


def _create(path: Path) -> tuple[int, int]:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Contains environments and token hashes: readable only by the owner.
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        return _identity(os.fstat(file))
    finally:
        os.close(file)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _use_wal(connection: sqlite3.Connection) -> bool:
    """Whether there is a log: some file systems have no shared memory for it. SQLite does not retry
    this by itself when two processes open a new file at once."""
    deadline = time.monotonic() + _BUSY_TIMEOUT
    while True:
        try:
            return bool(connection.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",))
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def transact(connection: sqlite3.Connection, begin: str, work: Callable[[DatabaseSession], T]) -> T:
    connection.execute(begin)
    try:
        result = work(SqliteSession(connection))
        connection.execute("COMMIT")
    except BaseException:
        # Some errors, such as a full disk, roll back by themselves.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return result


class SqliteSession:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, statement: str, *parameters: object) -> list[Row]:
        with closing(self._connection.execute(statement, parameters)) as cursor:
            return cursor.fetchall()

    def rows_of_each(self, queries: Sequence[Query]) -> list[list[Row]]:
        return [self.rows(statement, *parameters) for statement, parameters in queries]

    def run(self, statement: str, *parameters: object) -> None:
        self._connection.execute(statement, parameters).close()

    def run_many(self, statement: str, rows: Sequence[Row]) -> None:
        self._connection.executemany(statement, rows).close()

    def notify(self, change: StoreChange) -> None:
        """Other processes do not write, or poll."""
