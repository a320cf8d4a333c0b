"""What a SQL store needs of a database. All that differs between databases is behind this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Row = tuple[Any, ...]


class Session(Protocol):
    """One connection at work. Statements mark their parameters with `?`."""

    def rows(self, statement: str, *parameters: object) -> list[Row]: ...
    def run(self, statement: str, *parameters: object) -> None: ...
    def run_many(self, statement: str, rows: Sequence[Row]) -> None: ...


class Database(Protocol):
    """Work is a function of a session, so that it can be done again when a connection is lost."""

    text_type: str  # a column type for words that sorts by code point
    integer_type: str  # a column type for whole numbers of 64 bits
    for_update: str  # ends a SELECT whose rows nobody else may change until the commit
    migration_lock: str  # a statement that makes a second server wait; empty: writing does

    def read(self, work: Callable[[Session], T]) -> T:
        """One statement, or several that need not agree with each other."""
        ...

    def snapshot(self, work: Callable[[Session], T]) -> T:
        """Several statements that see one moment."""
        ...

    def write(self, work: Callable[[Session], T]) -> T:
        """One transaction: all of it or, when the work raises, nothing."""
        ...

    def close(self) -> None: ...
