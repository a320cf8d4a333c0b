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

# A server that froze or lost its network in a transaction holds locks, that of the lease among
# them. Shorter than a lease, so that another server takes over in time.
IDLE_TRANSACTION_TIMEOUT = "5s"


def open_postgres(url: str) -> SqlStore:
    return SqlStore(PostgresDatabase(url))


@cache
def _driver():
    try:
        import psycopg
    except ImportError as error:
        raise BadInput(
            "a postgresql:// store needs psycopg: pip install 'tpufleet[postgres]'"
        ) from error
    return psycopg


class PostgresDatabase:
    text_type = 'TEXT COLLATE "C"'
    integer_type = "BIGINT"
    for_update = " FOR UPDATE"
    migration_lock = "SELECT pg_advisory_xact_lock(7365001)"  # any number, the same for all servers

    def __init__(self, url: str) -> None:
        self._url = url
        errors = _driver().errors
        self._lost = (errors.OperationalError, errors.IdleInTransactionSessionTimeout)
        self._resting: list[psycopg.Connection] = []
        self._closed = False

    def read(self, work: Callable[[Session], T]) -> T:
        return self._twice(lambda connection: work(_PostgresSession(connection)))

    def snapshot(self, work: Callable[[Session], T]) -> T:
        return self._twice(
            lambda connection: self._transact(
                connection, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", work
            )
        )

    def write(self, work: Callable[[Session], T]) -> T:
        return self._twice(lambda connection: self._transact(connection, "BEGIN", work))

    def close(self) -> None:
        self._closed = True
        self._drop_resting()

    def _twice(self, use: Callable[[psycopg.Connection], T]) -> T:
        """Again on a new connection when the first was lost, as after a restart of the server. A
        transaction that was not committed left nothing behind."""
        try:
            return self._once(use)
        except self._lost:
            self._drop_resting()
        try:
            return self._once(use)
        except self._lost as error:
            raise Unreachable(f"the database does not answer: {_one_line(error)}") from error

    def _once(self, use: Callable[[psycopg.Connection], T]) -> T:
        if self._closed:
            raise FleetError("the store is closed")
        connection = self._take()
        try:
            return use(connection)
        except _driver().DataError as error:
            raise BadInput(f"the database cannot hold this: {_one_line(error)}") from error
        finally:
            self._rest(connection)

    def _transact(
        self, connection: psycopg.Connection, begin: str, work: Callable[[Session], T]
    ) -> T:
        connection.execute(begin)
        try:
            result = work(_PostgresSession(connection))
        except BaseException:
            # A lost connection cannot roll back, nor need it.
            with contextlib.suppress(self._lost):
                connection.execute("ROLLBACK")
            raise
        try:
            connection.execute("COMMIT")
        except self._lost as error:
            raise Unreachable(
                "the database was lost while it committed, and the change may or may not be "
                f"recorded: {_one_line(error)}"
            ) from error
        return result

    def _take(self) -> psycopg.Connection:
        try:
            return self._resting.pop()
        except IndexError:
            return self._connect()

    def _connect(self) -> psycopg.Connection:
        connection = _driver().connect(
            self._url,
            autocommit=True,  # transactions begin where we say
            connect_timeout=10,
            fallback_application_name="tpufleet",
        )
        connection.execute(
            f"SET idle_in_transaction_session_timeout = '{IDLE_TRANSACTION_TIMEOUT}'"
        )
        return connection

    def _rest(self, connection: psycopg.Connection) -> None:
        if connection.closed or self._closed:
            connection.close()
        else:
            self._resting.append(connection)
            if self._closed:
                self._drop_resting()

    def _drop_resting(self) -> None:
        while self._resting:
            self._resting.pop().close()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@lru_cache(maxsize=1024)
def _marked(statement: str) -> str:
    return statement.replace("?", "%s")


class _PostgresSession:
    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def rows(self, statement: str, *parameters: object) -> list[Row]:
        return self._connection.execute(_marked(statement), parameters).fetchall()

    def run(self, statement: str, *parameters: object) -> None:
        self._connection.execute(_marked(statement), parameters)

    def run_many(self, statement: str, rows: Sequence[Row]) -> None:
        with self._connection.cursor() as cursor:
            cursor.executemany(_marked(statement), rows)
