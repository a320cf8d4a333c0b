"""PostgreSQL, through psycopg (extra `postgres`). Lost connections are replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, TypeVar

from tpufleet.errors import BadInput, FleetError, Unreachable
from tpufleet.stores.database import Row, Session
from tpufleet.stores.sql import SqlStore

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")

# A server that hangs or loses its network inside a transaction holds locks, including that of the
# lease. Shorter than a lease, so that another server takes over in time.
IDLE_TRANSACTION_TIMEOUT = "5s"


def open_postgres(url: str) -> SqlStore:
    return SqlStore(PostgresDatabase(url))


@cache
def _driver():
    try:
        import psycopg
    except ImportError as error:
        raise BadInput(
            "a postgresql:// store requires psycopg: pip install 'tpufleet[postgres]'"
        ) from error
    return psycopg


class PostgresDatabase:
    text_type = 'TEXT COLLATE "C"'
    integer_type = "BIGINT"
    for_update = " FOR UPDATE"
    migration_lock = (
        "SELECT pg_advisory_xact_lock(7365001)"  # an arbitrary key, the same for all servers
    )

    def __init__(self, url: str) -> None:
        self._url = url
        errors = _driver().errors
        self._lost = (errors.OperationalError, errors.IdleInTransactionSessionTimeout)
        self._idle: list[psycopg.Connection] = []
        self._closed = False

    def read(self, work: Callable[[Session], T]) -> T:
        return self._with_retry(lambda connection: work(_PostgresSession(connection)))

    def snapshot(self, work: Callable[[Session], T]) -> T:
        return self._with_retry(
            lambda connection: self._transact(
                connection, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", work
            )
        )

    def write(self, work: Callable[[Session], T]) -> T:
        return self._with_retry(lambda connection: self._transact(connection, "BEGIN", work))

    def close(self) -> None:
        self._closed = True
        self._close_idle()

    def _with_retry(self, use: Callable[[psycopg.Connection], T]) -> T:
        """Retries once on a new connection when the first was lost, as after a server restart. An
        uncommitted transaction has no effect."""
        try:
            return self._use(use)
        except self._lost:
            self._close_idle()
        try:
            return self._use(use)
        except self._lost as error:
            raise Unreachable(f"database unavailable: {_one_line(error)}") from error

    def _use(self, use: Callable[[psycopg.Connection], T]) -> T:
        if self._closed:
            raise FleetError("store is closed")
        connection = self._acquire()
        try:
            return use(connection)
        except _driver().DataError as error:
            raise BadInput(f"value rejected by the database: {_one_line(error)}") from error
        finally:
            self._release(connection)

    def _transact(
        self, connection: psycopg.Connection, begin: str, work: Callable[[Session], T]
    ) -> T:
        connection.execute(begin)
        try:
            result = work(_PostgresSession(connection))
        except BaseException:
            # A lost connection cannot roll back, and need not.
            with contextlib.suppress(*self._lost):
                connection.execute("ROLLBACK")
            raise
        try:
            connection.execute("COMMIT")
        except self._lost as error:
            raise Unreachable(
                "connection to the database lost during commit; the change may or may not be "
                f"stored: {_one_line(error)}"
            ) from error
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
            connect_timeout=10,
            fallback_application_name="tpufleet",
        )
        connection.execute(
            f"SET idle_in_transaction_session_timeout = '{IDLE_TRANSACTION_TIMEOUT}'"
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


@lru_cache(maxsize=1024)
def _with_placeholders(statement: str) -> str:
    return statement.replace("?", "%s")


class _PostgresSession:
    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def rows(self, statement: str, *parameters: object) -> list[Row]:
        return self._connection.execute(_with_placeholders(statement), parameters).fetchall()

    def run(self, statement: str, *parameters: object) -> None:
        self._connection.execute(_with_placeholders(statement), parameters)

    def run_many(self, statement: str, rows: Sequence[Row]) -> None:
        with self._connection.cursor() as cursor:
            cursor.executemany(_with_placeholders(statement), rows)
