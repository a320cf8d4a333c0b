"""Opens the store at a URL. Each backend is imported only when it is used."""

from __future__ import annotations

from pathlib import Path

from tpufleet.errors import BadInput
from tpufleet.model.values import store_urls
from tpufleet.stores.base import Store
from tpufleet.stores.sql.database import Database


def open_store(url: str) -> Store:
    """`memory:`, `sqlite:///relative/path`, `sqlite:////absolute/path` or `postgresql://…`."""
    if url == "memory:":
        from tpufleet.stores.memory import MemoryStore

        return MemoryStore()
    return Store(open_database(url))


def open_database(url: str) -> Database:
    """The SQL database itself, which is not migrated."""
    scheme, _, rest = store_urls.check(url).partition(":")
    if scheme == "memory":
        raise BadInput("memory: is not a database; write sqlite:///path/fleet.db")
    if scheme == "sqlite":
        from tpufleet.stores.sql.sqlite import SqliteDatabase

        return SqliteDatabase(Path(rest.removeprefix("///")))
    from tpufleet.stores.sql.postgres import PostgresDatabase

    return PostgresDatabase(url)
