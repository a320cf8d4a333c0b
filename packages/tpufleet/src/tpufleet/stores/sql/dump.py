"""All rows of a database as lines of JSON, and back. The same for every SQL database, and for every
schema version: a dump is loaded into the schema that it was taken from, then migrated."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from typing import IO, Any

from tpufleet.errors import BadInput, Conflict
from tpufleet.stores.sql import schema_migrations
from tpufleet.stores.sql.database import Database, DatabaseSession, Row

_BATCH_ROWS = 5_000
# Of the server that is running, not of the data.
_LEFT_OUT = frozenset({"leases"})


def write_dump(database: Database, file: IO[str]) -> int:
    """Everything at one moment, while servers are running. Returns the schema version."""

    def work(session: DatabaseSession) -> int:
        file.seek(0)  # the work is repeated when the connection was lost
        file.truncate()
        version = schema_migrations.applied_version(session)
        for table, columns in _tables(session, database).items():
            if table not in _LEFT_OUT:
                file.write(_line({"table": table, "columns": columns}))
                for rows in _batches(session, table, columns):
                    file.writelines(_line(row) for row in rows)
        file.write(_line({"end": True}))
        return version

    return database.snapshot(work)


def load_dump(database: Database, lines: Iterable[str], version: int) -> None:
    """Into an empty database, as one transaction; then it is migrated."""
    migrations = schema_migrations.migrations()
    schema_migrations.require_known(version, max(migrations), "the backup")
    if schema_migrations.version(database):
        raise Conflict(
            "the database is not empty; restore into a new TPUFLEET_HOME or an empty database"
        )

    def work(session: DatabaseSession) -> None:
        then = {number: script for number, script in migrations.items() if number <= version}
        schema_migrations.apply(session, database, then)
        known = _tables(session, database)
        loaded = ""
        for table, columns, rows in _sections(lines):
            if table == "migrations":
                continue
            if columns != known.get(table):
                raise _damaged(table)
            if table != loaded:
                session.run(f"DELETE FROM {table}")
            loaded = table
            marks = ", ".join("?" * len(columns))
            if rows:
                session.run_many(
                    f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})", rows
                )
        schema_migrations.apply(session, database, migrations)

    database.write(work)


def _tables(session: DatabaseSession, database: Database) -> dict[str, list[str]]:
    """Our tables and their columns."""
    tables: dict[str, list[str]] = {}
    for table, column in session.rows(database.columns):
        if table in schema_migrations.key_sizes():
            tables.setdefault(table, []).append(column)
    return tables


def _batches(session: DatabaseSession, table: str, columns: list[str]) -> Iterator[list[Row]]:
    count = schema_migrations.key_sizes()[table]
    keys, marks = ", ".join(columns[:count]), ", ".join("?" * count)
    order = f"ORDER BY {keys} LIMIT {_BATCH_ROWS}"
    rows = session.rows(f"SELECT {', '.join(columns)} FROM {table} {order}")
    while rows:
        yield rows
        rows = session.rows(
            f"SELECT {', '.join(columns)} FROM {table} WHERE ({keys}) > ({marks}) {order}",
            *rows[-1][:count],
        )


def _damaged(table: str) -> BadInput:
    return BadInput(f"the database in the backup is not complete: see its table {table!r}")


def _sections(lines: Iterable[str]) -> Iterator[tuple[str, list[str], list[tuple[Any, ...]]]]:
    """Table, columns and some of its rows. Raises BadInput without the line that is the end."""
    table, columns, rows = "", list[str](), list[tuple[Any, ...]]()
    for line in lines:
        entry = json.loads(line)
        if isinstance(entry, list):
            rows.append(tuple(_decoded(value) for value in entry))
            if len(rows) == _BATCH_ROWS:
                yield table, columns, rows
                rows = []
            continue
        if table:
            yield table, columns, rows
        if "end" in entry:
            return
        table, columns, rows = entry["table"], entry["columns"], []
    raise _damaged(table)


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_encoded) + "\n"


def _encoded(value: bytes | memoryview) -> dict[str, str]:
    return {"base64": base64.b64encode(value).decode()}


def _decoded(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value
