"""PostgreSQL, through psycopg (extra `postgres`). Lost connections are replaced.

No call waits forever. The database ends statements that take too long; a watchdog disconnects from
a database that does not respond at all, because it is frozen or the network drops its packets.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, TypeVar

from tpufleet.errors import (
    BadInput,
    DatabaseFull,
    DatabaseUnreachable,
    Unreachable,
    optional_packages,
)
from tpufleet.stores.base import Store
from tpufleet.stores.records import StoreChange, Subscription
from tpufleet.stores.sql.database import DatabaseSession, Query, Row
from tpufleet.stores.sql.outage_log import OutageLog, closed, unavailable
from tpufleet.stores.sql.postgres_batches import combined
from tpufleet.stores.sql.postgres_listener import CHANNEL, PostgresListener

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")

# Written one by one, in the same message as other statements; more are prepared once and repeated.
FEW_ROWS = 8

# A server that hangs or loses its network inside a transaction holds locks, including that of the
# lease. Shorter than a lease, so that another server takes over in time.
IDLE_TRANSACTION_TIMEOUT = "4s"
# What is acknowledged survives a power cut, whatever the default of the database. A stricter one,
# such as remote_apply, stays.
_WAIT_FOR_DISK = (
    "SELECT set_config('synchronous_commit', 'on', false) "
    "WHERE current_setting('synchronous_commit') = 'off'"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """In seconds. The sum is shorter than what orchestrators wait between SIGTERM and SIGKILL."""

    connect: int = 5
    lock: float = 8.0  # waiting for another transaction; outlasts one that is idle
    statement: float = 10.0  # enforced by the database
    response: float = 12.0  # enforced here, when the database does not
    # How often it is tested that notifications arrive. A connection may be lost without a sign, and
    # a pooler in transaction mode passes no notifications on.
    notification: float = 10.0
    # How long a full disk is reported after a write that failed: small ones still succeed, into
    # space that the database already has.
    disk_full: float = 60.0


def open_postgres(url: str, timeouts: Timeouts | None = None) -> Store:
    return Store(PostgresDatabase(url, timeouts))


@cache
def _driver():
    with optional_packages("a postgresql:// store", "postgres"):
        import psycopg
    return psycopg


class PostgresDatabase:
    text_type = 'TEXT COLLATE "C"'
    integer_type = "BIGINT"
    background_batch = 10_000
    clustered = ""
    for_update = " FOR UPDATE"
    columns = (
        "SELECT table_name, column_name FROM information_schema.columns "
        "WHERE table_schema = current_schema() ORDER BY table_name, ordinal_position"
    )
    # Migrations may take as long as they need. The key is arbitrary, the same for all servers.
    migration_lock = (
        "SELECT set_config('statement_timeout', '0', true), set_config('lock_timeout', '0', true), "
        "pg_advisory_xact_lock(7365001)"
    )
    # Servers have clocks of their own; they compare leases by this one.
    time_in_micros = "SELECT (EXTRACT(EPOCH FROM clock_timestamp()) * 1000000)::BIGINT"

    unit_separator = "chr(31)"
    joined = "string_agg({column}, chr(30))"
    heartbeat_rows = (
        "SELECT value->>0, (value->>1)::bigint, value->>2, value->>3 "
        "FROM json_array_elements(?::json) WITH ORDINALITY AS reports(value, number) "
        "ORDER BY number"
    )
    # Built in, unlike the extension pg_trgm, which not every database offers.
    word_index: Sequence[str] = (
        "CREATE FUNCTION job_trigrams(words text) RETURNS text[] LANGUAGE sql IMMUTABLE "
        "PARALLEL SAFE AS 'SELECT array_agg(substr(words, i, 3)) "
        "FROM generate_series(1, length(words) - 2) AS i'",
        "CREATE INDEX job_search_by_words ON job_search USING gin (job_trigrams(words)) "
        "WHERE state <> ''",
    )
    word_matches = (
        "SELECT job_id FROM job_search WHERE state <> '' "
        "AND job_trigrams(words) @> string_to_array(?, chr(10))"
    )

    def __init__(self, url: str, timeouts: Timeouts | None = None) -> None:
        self._url = url
        self._listeners: list[PostgresListener] = []
        self._timeouts = timeouts or Timeouts()
        self._watchdog = _Watchdog(self._timeouts.response)
        self._unresponsive: Exception | None = None
        self._outages = OutageLog()
        self._probe = threading.Lock()
        errors = _driver().errors
        self._lost = (errors.OperationalError, errors.IdleInTransactionSessionTimeout)
        # It responds: another transaction holds a lock, or the statement takes too long.
        self._refused = (errors.LockNotAvailable, errors.QueryCanceled)
        self._idle: list[psycopg.Connection] = []
        self._closed = False
        self._write_error: tuple[DatabaseFull, float] | None = None  # and when it was raised

    def read(self, work: Callable[[DatabaseSession], T]) -> T:
        return self._with_retry(lambda connection: work(self._session(connection)))

    def snapshot(self, work: Callable[[DatabaseSession], T]) -> T:
        begin = ("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",)
        return self._with_retry(lambda connection: self._transact(connection, begin, work))

    def write(self, work: Callable[[DatabaseSession], T], *, durable: bool = True) -> T:
        begin = ("BEGIN",) if durable else ("BEGIN", "SET LOCAL synchronous_commit = off")
        try:
            result = self._with_retry(lambda connection: self._transact(connection, begin, work))
        except DatabaseFull as error:
            self._write_error = (error, time.monotonic())
            raise
        failed = self._write_error
        if failed is not None and time.monotonic() - failed[1] >= self._timeouts.disk_full:
            self._write_error = None
        return result

    def write_error(self) -> Unreachable | None:
        """Whether it can be reached is known from reading."""
        return None if self._write_error is None else self._write_error[0]

    def word_query(self, grams: Sequence[str]) -> str:
        return "\n".join(grams)

    def listen(self, on_change: Callable[[StoreChange], None]) -> Subscription:
        listener = PostgresListener(
            self._connect, self._session, on_change, self._timeouts.notification
        )
        self._listeners.append(listener)
        return listener

    def close(self) -> None:
        self._closed = True
        for listener in self._listeners:
            listener.close()
        self._close_idle()
        self._watchdog.stop()

    def _session(self, connection: psycopg.Connection) -> _PostgresSession:
        return _PostgresSession(connection, self._watchdog)

    def _with_retry(self, use: Callable[[psycopg.Connection], T]) -> T:
        began_at = time.monotonic()
        try:
            result = self._retried(use)
        except DatabaseUnreachable as error:
            self._outages.failed(error, began_at)
            raise
        self._outages.succeeded()
        return result

    def _retried(self, use: Callable[[psycopg.Connection], T]) -> T:
        """Retries once on a new connection when the first was lost, as after a server restart. An
        uncommitted transaction has no effect."""
        if self._unresponsive is not None:
            return self._try_again(use, self._unresponsive)
        started = time.monotonic()
        try:
            return self._use(use)
        except self._refused as error:
            raise Unreachable(unavailable("", _one_line(error))) from error
        except self._lost as error:
            self._close_idle()
            if time.monotonic() - started >= min(self._timeouts.connect, self._timeouts.response):
                self._unresponsive = error
                raise _unreachable(error) from error
        try:
            return self._use(use)
        except self._lost as error:
            raise _unreachable(error) from error

    def _try_again(self, use: Callable[[psycopg.Connection], T], last: Exception) -> T:
        """While the database does not respond, one call at a time tries. The others fail at once,
        so they do not occupy every thread."""
        if not self._probe.acquire(blocking=False):
            raise _unreachable(last) from last
        try:
            result = self._use(use)
        except self._lost as error:
            raise _unreachable(error) from error
        finally:
            self._probe.release()
        self._unresponsive = None
        return result

    def _use(self, use: Callable[[psycopg.Connection], T]) -> T:
        if self._closed:
            raise closed()
        connection = self._acquire()
        try:
            return use(connection)
        except (_driver().DataError, _driver().errors.ProgramLimitExceeded) as error:
            raise BadInput(f"value rejected by the database: {_one_line(error)}") from error
        except _driver().errors.DiskFull as error:
            raise DatabaseFull(
                f"the disk of the Postgres server is full: {_one_line(error)}\n"
                "  next: free space there, or make the disk larger; the server then continues"
            ) from error
        finally:
            self._release(connection)

    def _transact(
        self,
        connection: psycopg.Connection,
        begin: Sequence[str],
        work: Callable[[DatabaseSession], T],
    ) -> T:
        session = _PostgresSession(connection, self._watchdog, begin)
        try:
            result = work(session)
            session.commit()
        except BaseException as error:
            if isinstance(error, self._lost) and session.outcome_unknown:
                raise DatabaseUnreachable(
                    "connection to the database lost during commit; the change may or may not be "
                    f"stored: {_one_line(error)}"
                ) from error
            # A lost connection cannot roll back, and need not.
            with contextlib.suppress(*self._lost):
                session.roll_back()
            raise
        return result

    def _acquire(self) -> psycopg.Connection:
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect()

    def _connect(self) -> psycopg.Connection:
        connection = _driver().connect(
            self._url,
            autocommit=True,  # transactions are explicit
            connect_timeout=self._timeouts.connect,
            # Unsent data is given up when the network drops its packets.
            tcp_user_timeout=int(self._timeouts.response * 1000),
            fallback_application_name="tpufleet",
        )
        self._session(connection).run(
            f"SET idle_in_transaction_session_timeout = '{IDLE_TRANSACTION_TIMEOUT}'; "
            f"SET statement_timeout = {int(self._timeouts.statement * 1000)}; "
            f"SET lock_timeout = {int(self._timeouts.lock * 1000)}; {_WAIT_FOR_DISK}"
        )
        return connection

    def _release(self, connection: psycopg.Connection) -> None:
        if connection.closed or self._closed:
            connection.close()
        else:
            self._idle.append(connection)
            if self._closed:
                self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _unreachable(error: Exception) -> DatabaseUnreachable:
    return DatabaseUnreachable(f"database unavailable: {_one_line(error)}")


@lru_cache(maxsize=1024)
def _with_placeholders(statement: str) -> str:
    return statement.replace("?", "%s")


def _rows(cursor: psycopg.Cursor) -> list[Row]:
    return cursor.fetchall() if cursor.description else []


class _PostgresSession:
    """With few round trips: `begin` is sent with the first statement; what is written with what
    follows, at the latest with the commit."""

    def __init__(
        self, connection: psycopg.Connection, watchdog: _Watchdog, begin: Sequence[str] = ()
    ) -> None:
        self._connection = connection
        self._watchdog = watchdog
        self._migrating = False
        self._transaction = bool(begin)
        self._begin = begin  # until it is sent
        self._writes: list[tuple[str, Sequence[Row]]] = []  # until they are sent
        self._notifications: list[StoreChange] = []
        self._committing = False

    def rows(self, statement: str, *parameters: object) -> list[Row]:
        return self._send([(statement, parameters)])[0]

    def rows_of_each(self, queries: Sequence[Query]) -> list[list[Row]]:
        return self._send(queries)

    def run(self, statement: str, *parameters: object) -> None:
        self._migrating = self._migrating or statement == PostgresDatabase.migration_lock
        self._send([(statement, parameters)])

    def run_many(self, statement: str, rows: Sequence[Row]) -> None:
        if rows:
            self._writes.append((statement, rows))
            if not self._transaction:
                self._send([])

    def notify(self, change: StoreChange) -> None:
        self._notifications.append(change)

    def commit(self) -> None:
        if self._begin and not self._writes:
            return  # nothing was sent
        calls = [f"pg_notify({CHANNEL}, '{each.value}')" for each in self._notifications]
        notify: list[Query] = [(f"SELECT {', '.join(calls)}", ())] if calls else []
        self._committing = True
        self._send([*notify, ("COMMIT", ())])

    @property
    def outcome_unknown(self) -> bool:
        """Whether a commit was sent, and the database has neither confirmed nor rejected it."""
        if not self._committing:
            return False
        status = _driver().pq.TransactionStatus
        return self._connection.info.transaction_status not in (status.INERROR, status.IDLE)

    def roll_back(self) -> None:
        if not self._begin and self._connection.info.transaction_status:
            self._begin, self._writes = (), []
            self._send([("ROLLBACK", ())])

    def _send(self, queries: Sequence[Query]) -> list[list[Row]]:
        """In this order: the begin, what is to be written, the queries. Returns the rows of each
        query."""
        writes, self._writes = self._writes, []
        pending: list[Query] = []
        for statement, rows in combined(writes):
            if len(rows) <= FEW_ROWS:
                pending += [(statement, row) for row in rows]
                continue
            self._send_together(pending)
            pending = []
            with self._watched(), self._connection.cursor() as cursor:
                cursor.executemany(_with_placeholders(statement), rows)
        results: list[list[Row]] = []
        together: list[Query] = []
        for query in (*pending, *queries):
            if any(isinstance(each, bytes) for each in query[1]):
                # As text in a message it would be twice as long.
                results += self._send_together(together)
                results += self._send_together([query])
                together = []
            else:
                together.append(query)
        results += self._send_together(together)
        return results[len(pending) :]

    def _send_together(self, queries: Sequence[Query]) -> list[list[Row]]:
        """As one message. Not in psycopg's pipeline mode: there the database ends neither an idle
        transaction nor a session that stops halfway, and their locks would stay."""
        begin, self._begin = self._begin, ()
        queries = [*((statement, ()) for statement in begin), *queries]
        if not queries:
            return []
        if len(queries) == 1:
            statement, parameters = _with_placeholders(queries[0][0]), queries[0][1] or None
        else:
            statement, parameters = self._message(queries), None
        with self._watched():
            cursor = self._connection.execute(statement, parameters)
        results = [_rows(cursor)]
        while cursor.nextset():
            results.append(_rows(cursor))
        return results[len(begin) :]

    def _message(self, queries: Sequence[Query]) -> str:
        quote = _driver().ClientCursor(self._connection).mogrify
        return "; ".join(
            quote(_with_placeholders(statement), parameters) if parameters else statement
            for statement, parameters in queries
        )

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        if self._migrating:
            return contextlib.nullcontext()
        return self._watchdog.watch(self._connection)


class _Watchdog:
    """Disconnects from a database that does not respond. psycopg itself waits forever."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._deadlines: dict[int, tuple[float, psycopg.Connection]] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watch(self, connection: psycopg.Connection) -> Iterator[None]:
        key = id(connection)
        with self._lock:
            self._deadlines[key] = (time.monotonic() + self._timeout, connection)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="postgres watchdog", daemon=True
                )
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._deadlines.pop(key, None)

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._timeout / 10):
            now = time.monotonic()
            with (
                self._lock
            ):  # so that no connection is closed, and its descriptor reused, meanwhile
                late = [
                    (key, connection)
                    for key, (deadline, connection) in self._deadlines.items()
                    if deadline < now
                ]
                for key, connection in late:
                    del self._deadlines[key]
                    _disconnect(connection)


def _disconnect(connection: psycopg.Connection) -> None:
    """Wakes the thread that waits for a response, with an error. Safe from any thread."""
    with (
        contextlib.suppress(OSError, _driver().Error),  # already closed
        socket.socket(fileno=os.dup(connection.fileno())) as duplicate,
    ):
        duplicate.shutdown(socket.SHUT_RDWR)
