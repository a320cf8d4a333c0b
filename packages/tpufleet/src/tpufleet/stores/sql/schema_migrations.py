"""Brings a database to the schema of this version: numbered migrations, each applied once.

A migration is a file in `migrations/`, or a function where SQL alone cannot do it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import resources

from tpufleet.errors import Conflict
from tpufleet.stores.sql.database import Database, DatabaseSession
from tpufleet.stores.sql.job_references import fill_job_references
from tpufleet.stores.sql.json_key_renames import rename_json_keys
from tpufleet.stores.sql.resource_history import fill_resource_history
from tpufleet.stores.sql.search_backfill import fill_job_search
from tpufleet.stores.sql.usage_times import fill_usage_times

Migration = str | Callable[[DatabaseSession], None]  # SQL, or a function

_FUNCTIONS: dict[int, Migration] = {
    5: rename_json_keys,
    13: fill_job_search,
    24: fill_job_references,  # checkpoint locations
}
# Run after the file of the same number.
_FILLS: dict[int, Callable[[DatabaseSession], None]] = {
    22: fill_job_references,
    25: fill_resource_history,
    27: fill_usage_times,
}


@cache
def migrations() -> dict[int, Migration]:
    """By number, in order."""
    folder = resources.files("tpufleet.stores.sql") / "migrations"
    files = {
        int(file.name.partition("_")[0]): file.read_text(encoding="utf-8")
        for file in folder.iterdir()
        if re.fullmatch(r"\d{4}_\w+\.sql", file.name)
    }
    assert not files.keys() & _FUNCTIONS.keys(), "two migrations have one number"
    return dict(sorted({**files, **_FUNCTIONS}.items()))


@cache
def table_names() -> frozenset[str]:
    scripts = [script for script in migrations().values() if isinstance(script, str)]
    created = [name for script in scripts for name in re.findall(r"CREATE TABLE (\w+)", script)]
    return frozenset({"migrations", *created})


@cache
def key_sizes() -> dict[str, int]:
    """How many columns the primary key of each table has. They are its first columns."""
    scripts = [script for script in migrations().values() if isinstance(script, str)]
    keys = [
        re.findall(r"CREATE TABLE (\w+) \((?:(?!\n\)).)*PRIMARY KEY \(([^)]*)\)", script, re.DOTALL)
        for script in scripts
    ]
    return dict.fromkeys(table_names(), 1) | {
        table: len(columns.split(",")) for found in keys for table, columns in found
    }


def newest_version() -> int:
    return max(migrations())


def applied_version(session: DatabaseSession) -> int:
    return session.rows("SELECT COALESCE(MAX(number), 0) FROM migrations")[0][0]


def version(database: Database) -> int:
    """Of a database that may be empty."""
    return database.read(
        lambda session: (
            applied_version(session)
            if any(table == "migrations" for table, _ in session.rows(database.columns))
            else 0
        )
    )


def migrate(database: Database) -> None:
    """Safe when several servers start at once: one applies, the others find it applied."""
    database.write(lambda session: apply(session, database))


def apply(session: DatabaseSession, database: Database, *, up_to: int | None = None) -> None:
    if database.migration_lock:
        session.run(database.migration_lock)
    session.run(
        f"CREATE TABLE IF NOT EXISTS migrations (number {database.integer_type} PRIMARY KEY)"
    )
    applied, newest = applied_version(session), newest_version()
    if applied > newest:
        raise Conflict(
            f"the database has schema version {applied}; this tpufleet supports versions up to "
            f"{newest}: install the tpufleet that wrote it, or a newer one"
        )
    for number, migration in migrations().items():
        if applied < number <= (up_to or newest):
            if callable(migration):
                migration(session)
            else:
                for statement in statements(migration, database):
                    session.run(statement)
            if number in _FILLS:
                _FILLS[number](session)
            session.run("INSERT INTO migrations (number) VALUES (?)", number)


def statements(script: str, database: Database) -> list[str]:
    """Scripts have no semicolons inside text, so they are split at each one."""
    without_comments = re.sub(r"--[^\n]*", "", script)
    typed = without_comments.replace("$text", database.text_type)
    typed = typed.replace("$number", database.integer_type)
    typed = typed.replace("$clustered", database.clustered)
    parts = [part.strip() for part in typed.split(";") if part.strip()]
    return [
        statement
        for part in parts
        for statement in (database.word_index if part == "$word_index" else (part,))
    ]
