"""Opens the store at a URL. Each backend is imported only when it is used."""

from __future__ import annotations

from pathlib import Path

from tpufleet.errors import BadInput
from tpufleet.stores.base import Store


def open_store(url: str) -> Store:
    """`memory:`, `sqlite:///relative/path`, `sqlite:////absolute/path` or `postgresql://…`."""
    scheme, _, rest = url.partition(":")
    if url == "memory:":
        from tpufleet.stores.memory import MemoryStore

        return MemoryStore()
    if scheme == "sqlite" and rest.startswith("///") and rest != "///":
        from tpufleet.stores.sqlite import open_sqlite

        return open_sqlite(Path(rest.removeprefix("///")))
    if scheme in ("postgresql", "postgres") and rest.startswith("//"):
        from tpufleet.stores.postgres import open_postgres

        return open_postgres(url)
    # The URL may contain a password, so only its scheme is shown.
    raise BadInput(
        f"unknown store {scheme + ':…'!r}; "
        "write memory:, sqlite:///path/fleet.db or postgresql://user@host/database"
    )
