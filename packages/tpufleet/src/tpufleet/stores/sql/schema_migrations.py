"""Brings a database to the schema of this version: the numbered SQL files in `migrations/`, each
applied once. There is no way back; see docs/decisions/0029-release-reset.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources

from tpufleet.errors import Conflict
from tpufleet.stores.sql.database import Database, DatabaseSession


@cache
def migrations() -> dict[int, str]:
    """SQL by number, in order."""
    folder = resources.files("tpufleet.stores.sql") / "migrations"
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".sql"))
    scripts = {
        int(name.partition("_")[0]): (folder / name).read_text(encoding="utf-8") for name in files
    }
    assert len(scripts) == len(files), files  # one number, two migrations
    return scripts


@cache
def key_sizes() -> dict[str, int]:
    """Every table, and how many columns its primary key has. They are its first columns."""
    created = re.findall(
        r"CREATE TABLE (\w+) \((.*?)\n\)", "\n".join(migrations().values()), re.DOTALL
    )
    keys = {table: re.search(r"PRIMARY KEY \(([^)]*)\)", body) for table, body in created}
    return {"migrations": 1} | {
        table: 1 if key is None else len(key[1].split(",")) for table, key in keys.items()
    }


def newest_version() -> int:
    return max(migrations())


def applied_version(session: DatabaseSession) -> int:
    return session.rows("SELECT COALESCE(MAX(number), 0) FROM migrations")[0][0]


def version(database: Database) -> int:
    """0: the database is empty."""
    return database.read(
        lambda session: (
            applied_version(session)
            if any(table == "migrations" for table, _ in session.rows(database.columns))
            else 0
        )
    )


def require_known(version: int, newest: int, owner: str) -> None:
    if version > newest:
        raise Conflict(
            f"{owner} has schema version {version}; this tpufleet supports versions up to "
            f"{newest}\n  next: install the tpufleet that wrote it, or a newer one"
        )


def migrate(database: Database) -> None:
    """Safe when several servers start at once: one applies, the others find it applied."""
    database.write(lambda session: apply(session, database, migrations()))


def apply(session: DatabaseSession, database: Database, scripts: Mapping[int, str]) -> None:
    if database.migration_lock:
        session.run(database.migration_lock)
    session.run(
        f"CREATE TABLE IF NOT EXISTS migrations (number {database.integer_type} PRIMARY KEY)"
    )
    applied = applied_version(session)
    require_known(applied, max(scripts), "the database")
    for number, script in scripts.items():
        if number > applied:
            for statement in statements(script, database):
                session.run(statement)
            session.run("INSERT INTO migrations (number) VALUES (?)", number)


def statements(script: str, database: Database) -> list[str]:
    """Scripts have no semicolons inside text, so they are split at each one."""
    typed = re.sub(r"--[^\n]*", "", script).replace("$text", database.text_type)
    typed = typed.replace("$number", database.integer_type)
    typed = typed.replace("$clustered", database.clustered)
    parts = [part.strip() for part in typed.split(";") if part.strip()]
    return [
        statement
        for part in parts
        for statement in (database.word_index if part == "$word_index" else (part,))
    ]
