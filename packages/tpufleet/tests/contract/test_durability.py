"""What is acknowledged survives a power cut: a commit waits for the disk."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests import postgres
from tests.contract import store_builders as a
from tpufleet.model.fleet.hosts import HostLiveness
from tpufleet.stores.base import ChangeSet, Store
from tpufleet.stores.sql.postgres import PostgresDatabase
from tpufleet.stores.sql.sqlite import SqliteDatabase

MODES = {
    "sqlite": ("PRAGMA synchronous", {2: True, 1: False}),
    "postgres": ("SHOW synchronous_commit", {"on": True, "off": False}),
}
NOW = datetime.fromisoformat("2026-01-01T00:00:00+00:00")


class RecordingDatabase:
    """A real database that notes the mode of each transaction from inside it."""

    def __init__(self, database: Any, kind: str) -> None:
        self._database = database
        self._statement, self._meaning = MODES[kind]
        self.durable: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def write(self, work: Callable[[Any], Any], **options: Any) -> Any:
        def recorded(session: Any) -> Any:
            self.durable.append(self._meaning[session.rows(self._statement)[0][0]])
            return work(session)

        return self._database.write(recorded, **options)


@pytest.fixture(params=MODES)
def database(request, tmp_path):
    if request.param == "sqlite":
        database = SqliteDatabase(tmp_path / "fleet.db")
    else:
        database = PostgresDatabase(postgres.fresh_url())
    yield RecordingDatabase(database, request.param)
    database.close()


def test_commits_are_durable_and_liveness_need_not_be(database):
    store = Store(database)
    database.durable.clear()
    store.commit(ChangeSet(new_jobs=[a.job()], messages=[a.message()]))
    store.put_user(a.user())
    assert database.durable == [True, True]
    store.record_heartbeats([HostLiveness(host_id="s1/0", seen_at=NOW)])
    assert database.durable == [True, True, False]
    store.acquire_lease("c", "me", timedelta(seconds=9), NOW)
    assert database.durable[-1] is True, "the mode of one transaction does not outlive it"
