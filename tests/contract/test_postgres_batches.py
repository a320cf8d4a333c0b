"""Writes that are sent to Postgres as few statements, with the effect of one after the other."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import postgres
from tests.contract import store_builders as a
from tpufleet.stores.base import ChangeSet
from tpufleet.stores.open_store import open_store
from tpufleet.stores.postgres import PostgresDatabase
from tpufleet.stores.postgres_batches import combined

psycopg = pytest.importorskip("psycopg", reason="needs the extra `postgres`")
TABLES = {
    "kept": "INSERT INTO kept (k, v) VALUES (?, ?) ON CONFLICT DO NOTHING",
    "latest": (
        "INSERT INTO latest (k, v) VALUES (?, ?) ON CONFLICT (k) DO UPDATE SET v = excluded.v"
    ),
    "counted": (
        "INSERT INTO counted (k, v) VALUES (?, ?) "
        "ON CONFLICT (k) DO UPDATE SET v = counted.v + excluded.v"
    ),
}
values = st.tuples(st.integers(0, 5), st.integers(0, 9))
writes = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(TABLES.values())), st.lists(values, min_size=1)),
        st.tuples(
            st.sampled_from([f"DELETE FROM {table} WHERE k = ?" for table in TABLES]),
            st.lists(st.tuples(st.integers(0, 5)), min_size=1),
        ),
        st.tuples(st.just("UPDATE latest SET v = ? WHERE k = ?"), st.lists(values, min_size=1)),
    )
)


def one_by_one(given_writes) -> list[list[tuple]]:
    """SQLite has the same semantics."""
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        for table in TABLES:
            database.execute(f"CREATE TABLE {table} (k INTEGER PRIMARY KEY, v INTEGER)")
        for statement, rows in given_writes:
            database.executemany(statement, rows)
        return [database.execute(f"SELECT * FROM {name} ORDER BY k").fetchall() for name in TABLES]


@pytest.fixture(scope="module")
def database():
    with contextlib.closing(PostgresDatabase(postgres.fresh_url())) as opened:
        for table in TABLES:
            create = f"CREATE TABLE {table} (k BIGINT PRIMARY KEY, v BIGINT)"
            opened.write(lambda session, create=create: session.run(create))
        yield opened


@given(writes)
def test_the_effect_is_that_of_one_write_after_the_other(database, given_writes):
    def work(session):
        session.run(f"TRUNCATE {', '.join(TABLES)}")
        for statement, rows in given_writes:
            session.run_many(statement, rows)

    database.write(work)
    stored = database.read(
        lambda session: [session.rows(f"SELECT * FROM {name} ORDER BY k") for name in TABLES]
    )
    assert stored == one_by_one(given_writes)


def test_a_failed_write_is_an_error_and_nothing_is_kept(database):
    def work(session):
        session.run("TRUNCATE kept")
        session.run_many(TABLES["kept"], [(1, 1)])
        session.run_many("INSERT INTO latest (k, v) VALUES (?, ?)", [(7, 1), (7, 2)])

    with pytest.raises(psycopg.errors.UniqueViolation):
        database.write(work)
    assert database.read(lambda session: session.rows("SELECT * FROM kept WHERE k = 1")) == []
    database.write(lambda session: None)  # the connection is usable, and nothing is to be sent


def test_rows_for_several_tables_are_one_statement():
    first, second = TABLES["kept"], TABLES["latest"]
    ((statement, rows),) = combined([(first, [(1, 2)]), (second, [(3, 4)])])
    assert statement == f"WITH part_0 AS ({first}) {second}"
    assert rows == [(1, 2, 3, 4)]


@pytest.fixture
def sent(monkeypatch) -> list[str]:
    """What is sent to databases."""
    queries: list[str] = []
    execute = psycopg.Connection.execute

    def recorded(connection, query, *arguments, **options):
        queries.append(query)
        return execute(connection, query, *arguments, **options)

    monkeypatch.setattr(psycopg.Connection, "execute", recorded)
    return queries


def test_a_submission_is_four_round_trips(sent):
    with contextlib.closing(open_store(postgres.fresh_url())) as store:
        store.put_user(a.user("ada"))
        sent.clear()
        store.commit(
            ChangeSet(
                new_jobs=[a.job("j1")],
                messages=[a.message()],
                events=[a.event()],
                required_user="ada",
            )
        )
        assert [query.split()[0] for query in sent] == ["BEGIN;", "SELECT", "WITH", "SELECT"]
        assert sent[0].startswith("BEGIN; UPDATE numbers")
        assert sent[-1].endswith("COMMIT")
        assert store.job("j1") == a.job("j1")
