"""Writes of one transaction as few statements: each costs its caller and the database time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from tpufleet.stores.sql.database import Row

Write = tuple[str, Sequence[Row]]  # a statement with `?`, and the parameters of each run

_INSERT = re.compile(r"INSERT INTO (?P<table>\w+) \([\w, ]+\) VALUES \((?:\?, )*\?\)")


def combined(writes: Iterable[Write]) -> Iterator[Write]:
    """Statements with the effect of `writes` in this order: single rows for different tables are
    one. One that has several rows is sent as it is: psycopg does not wait between them."""
    rows_of: dict[str, tuple[str, Row]] = {}  # by table: to be sent together
    for statement, rows in writes:
        insert = _INSERT.match(statement)
        if insert is None or len(rows) > 1:
            yield from _joined(rows_of)
            rows_of = {}
            yield statement, rows
            continue
        if insert["table"] in rows_of:
            yield from _joined(rows_of)
            rows_of = {}
        rows_of[insert["table"]] = (statement, rows[0])
    yield from _joined(rows_of)


def _joined(rows_of: dict[str, tuple[str, Row]]) -> Iterator[Write]:
    """One statement: none of its parts sees what the others insert, and none has to."""
    if not rows_of:
        return
    *others, (last, _) = rows_of.values()
    parameters = tuple(chain.from_iterable(row for _, row in rows_of.values()))
    parts = ", ".join(f"part_{number} AS ({each})" for number, (each, _) in enumerate(others))
    yield (f"WITH {parts} {last}" if parts else last), [parameters]
