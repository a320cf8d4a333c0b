"""Opens the store at a URL. Each backend is imported only when it is used."""

from __future__ import annotations

from pathlib import Path

from tpufleet.errors import BadInput
from tpufleet.stores.base import Store
from tpufleet.stores.database import Database


def open_store(url: str) -> Store:
    """`memory:`, `sqlite:///relative/path`, `sqlite:////absolute/path` or `postgresql://…`."""
    if url == "memory:":
        from tpufleet.stores.memory import MemoryStore

        return MemoryStore()
    database = open_database(url)
    from tpufleet.stores.sql import SqlStore

    return SqlStore(database)


def open_database(url: str) -> Database:
    """The SQL database itself, which is not migrated."""
    scheme, _, rest = url.partition(":")
    if scheme == "sqlite" and rest.startswith("///") and rest != "///":
        from tpufleet.stores.sqlite import SqliteDatabase

        return SqliteDatabase(Path(rest.removeprefix("///")))
    if scheme in ("postgresql", "postgres") and rest.startswith("//"):
        from tpufleet.stores.postgres import PostgresDatabase

        return PostgresDatabase(url)
    # The URL may contain a password, so only its scheme is shown.
    raise BadInput(
        f"unknown store {scheme + ':…'!r}; "
        "write memory:, sqlite:///path/fleet.db or postgresql://user@host/database"
    )
