"""The interface of a SQL database. All differences between databases are behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Row = tuple[Any, ...]


class DatabaseSession(Protocol):
    """A connection in use. The placeholder for parameters is `?`."""

    def rows(self, statement: str, *parameters: object) -> list[Row]: ...
    def run(self, statement: str, *parameters: object) -> None: ...
    def run_many(self, statement: str, rows: Sequence[Row]) -> None: ...


class Database(Protocol):
    """Work is a function of a session, so that it can be retried when a connection is lost."""

    text_type: str  # column type for text, sorted by code point
    integer_type: str  # column type for 64-bit integers
    clustered: str  # suffix of a table that is stored in the order of its key; empty: as inserted
    for_update: str  # suffix of a SELECT that locks its rows until the commit
    time_in_micros: str  # statement that reads the database's clock; empty: it has none of its own
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

    def close(self) -> None: ...
