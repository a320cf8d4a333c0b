"""The interface of a SQL database. All differences between databases are behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from tpufleet.errors import Unreachable
from tpufleet.stores.records import StoreChange, Subscription

T = TypeVar("T")
Row = tuple[Any, ...]
Query = tuple[str, Sequence[object]]  # a statement and its parameters


class NoNotifications:
    """Of a database that has none."""

    connected = False

    def close(self) -> None:
        """There is nothing to close."""


class DatabaseSession(Protocol):
    """A connection in use. The placeholder for parameters is `?`."""

    def rows(self, statement: str, *parameters: object) -> list[Row]: ...
    def rows_of_each(self, queries: Sequence[Query]) -> list[list[Row]]:
        """One after the other, but sent together: each sees what the earlier ones did."""
        ...

    def run(self, statement: str, *parameters: object) -> None: ...
    def run_many(self, statement: str, rows: Sequence[Row]) -> None:
        """Once for each row. In a transaction they may be sent later, but before anything that
        follows; so an error of theirs may be raised there."""
        ...

    def notify(self, change: StoreChange) -> None:
        """Tell all servers at the commit, where the database can: see `Database.listen`."""
        ...


class Database(Protocol):
    """Work is a function of a session, so that it can be retried when a connection is lost."""

    text_type: str  # column type for text, sorted by code point
    integer_type: str  # column type for 64-bit integers
    background_batch: int  # heartbeats or metrics at a time: other writers wait briefly
    clustered: str  # suffix of a table that is stored in the order of its key; empty: as inserted
    for_update: str  # suffix of a SELECT that locks its rows until the commit
    time_in_micros: str  # statement that reads the database's clock; empty: it has none of its own
    unit_separator: str  # between columns that are joined too
    joined: str  # aggregate of a column, {column}: all rows as one text; see `sql_rows.split`
    heartbeat_rows: (
        str  # SELECT of columns of `heartbeats` from a JSON array of arrays, a parameter
    )
    word_index: Sequence[str]  # statements that create it: three characters in a row → ended jobs
    columns: str  # statement that lists tables and their columns, in order
    migration_lock: str  # statement that serializes migrations; empty: writes are serialized anyway

    def read(self, work: Callable[[DatabaseSession], T]) -> T:
        """One statement, or several that need not be consistent with each other."""
        ...

    def snapshot(self, work: Callable[[DatabaseSession], T]) -> T:
        """Several statements on one consistent snapshot."""
        ...

    def write(self, work: Callable[[DatabaseSession], T], *, durable: bool = True) -> T:
        """One transaction, rolled back when the work raises. Once it returns, a power cut cannot
        undo it, unless `durable` is False: for what is soon written again."""
        ...

    def write_error(self) -> Unreachable | None:
        """See `Store.write_error`."""
        ...

    @property
    def word_matches(self) -> str:
        """Statement that reads the index, with the result of `word_query`; empty: there is none."""
        ...

    def word_query(self, grams: Sequence[str]) -> str:
        """The parameter of `word_matches` for jobs that have all of these."""
        ...

    def listen(self, on_change: Callable[[StoreChange], None]) -> Subscription:
        """Receive what sessions `notify`."""
        ...

    def close(self) -> None: ...
