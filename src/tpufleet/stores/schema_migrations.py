"""Brings a database to the form this version expects: numbered SQL files, each applied once."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

from tpufleet.errors import Conflict
from tpufleet.stores.database import Database, Session


@cache
def migrations() -> dict[int, str]:
    """Number → SQL, in order."""
    folder = resources.files("tpufleet.stores") / "migrations"
    found = {
        int(file.name.partition("_")[0]): file.read_text(encoding="utf-8")
        for file in folder.iterdir()
        if re.fullmatch(r"\d{4}_\w+\.sql", file.name)
    }
    return dict(sorted(found.items()))


def migrate(database: Database) -> None:
    """Safe when several servers start at once: the first applies, the others find it done."""
    database.write(lambda session: _apply(session, database))


def _apply(session: Session, database: Database) -> None:
    if database.migration_lock:
        session.run(database.migration_lock)
    session.run(
        f"CREATE TABLE IF NOT EXISTS migrations (number {database.integer_type} PRIMARY KEY)"
    )
    done = session.rows("SELECT COALESCE(MAX(number), 0) FROM migrations")[0][0]
    newest = max(migrations())
    if done > newest:
        raise Conflict(
            f"the database is at version {done}, and this tpufleet knows versions up to {newest}: "
            "install the tpufleet that wrote it, or a newer one"
        )
    for number, script in migrations().items():
        if number > done:
            for statement in statements(script, database):
                session.run(statement)
            session.run("INSERT INTO migrations (number) VALUES (?)", number)


def statements(script: str, database: Database) -> list[str]:
    """Migrations hold no text with semicolons, so they are cut at each one."""
    without_comments = re.sub(r"--[^\n]*", "", script)
    typed = without_comments.replace("$text", database.text_type).replace(
        "$number", database.integer_type
    )
    return [part.strip() for part in typed.split(";") if part.strip()]
