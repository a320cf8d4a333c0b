"""Writes that are sent to Postgres as few statements, with the effect of one after the other."""

from __future__ import annotations

import contextlib
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests import postgres
from tests.contract import store_builders as a
from tests.polling import wait_until
from tpufleet.errors import Unreachable
from tpufleet.stores.base import ChangeSet
from tpufleet.stores.open_store import open_store
from tpufleet.stores.sql.postgres import PostgresDatabase, Timeouts
from tpufleet.stores.sql.postgres_batches import combined

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


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(st.lists(st.tuples(texts, st.none() | texts), max_size=12))
@example([("?", "%s"), ("'; DROP TABLE texts; --", "\\'"), ("%", "$1"), (":x", "\\"), ("", None)])
def test_any_text_is_stored_as_it_is(database, rows):
    """Statements that are sent together contain their parameters."""

    def work(session):
        session.run("CREATE TEMPORARY TABLE texts (k BIGINT, a TEXT, b TEXT) ON COMMIT DROP")
        for number, row in enumerate(rows):
            session.run_many("INSERT INTO texts (k, a, b) VALUES (?, ?, ?)", [(number, *row)])
        query = "SELECT a, b FROM texts WHERE k = ? AND a = ?"
        return session.rows_of_each([(query, (n, row[0])) for n, row in enumerate(rows)])

    assert database.write(work) == [[row] for row in rows]


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


def test_a_row_that_another_transaction_holds_is_a_refusal_and_no_doubt(database):
    """Writes are sent with the commit, but the database says that they failed."""
    url = postgres.fresh_url()
    with (
        contextlib.closing(PostgresDatabase(url, Timeouts(lock=0.2))) as opened,
        psycopg.connect(url) as other,
    ):
        opened.write(lambda session: session.run("CREATE TABLE held (k INT PRIMARY KEY, v INT)"))
        opened.write(lambda session: session.run_many("INSERT INTO held VALUES (?, ?)", [(1, 1)]))
        other.execute("SELECT v FROM held WHERE k = 1 FOR UPDATE")

        def work(session):
            session.run_many("INSERT INTO held VALUES (?, ?)", [(2, 1)])
            session.run_many("UPDATE held SET v = ? WHERE k = ?", [(2, 1)])

        with pytest.raises(Unreachable, match=r"^database is unavailable: .*lock timeout"):
            opened.write(work)
        other.rollback()
        assert opened.read(lambda session: session.rows("SELECT * FROM held")) == [(1, 1)]
        opened.write(work)
        assert opened.read(lambda session: session.rows("SELECT v FROM held ORDER BY k")) == [
            (2,),
            (1,),
        ]


def test_it_is_not_known_what_became_of_a_commit_whose_connection_was_lost():
    url = postgres.fresh_url()
    with (
        contextlib.closing(PostgresDatabase(url)) as opened,
        psycopg.connect(url, autocommit=True) as other,
    ):
        opened.write(lambda session: session.run("CREATE TABLE slow (k INT)"))
        # The commit waits for the check, during which the connection is lost.
        opened.write(
            lambda session: session.run(
                "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
                "'BEGIN PERFORM pg_sleep(60); RETURN NULL; END'"
            )
        )
        opened.write(
            lambda session: session.run(
                "CREATE CONSTRAINT TRIGGER waits AFTER INSERT ON slow DEFERRABLE "
                "INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait()"
            )
        )

        def disconnect() -> None:
            waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
            ((pid,),) = wait_until(lambda: other.execute(waiting).fetchall())
            other.execute("SELECT pg_terminate_backend(%s)", [pid])

        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(disconnect)
            with pytest.raises(Unreachable, match="may or may not be stored"):
                opened.write(
                    lambda session: session.run_many("INSERT INTO slow VALUES (?)", [(1,)])
                )
            ended.result()


@pytest.fixture
def sent(monkeypatch) -> list[str]:
    """The messages to databases, each of which is a round trip."""
    messages: list[str] = []
    execute = psycopg.Connection.execute

    def recorded(connection, query, *arguments, **options):
        messages.append(query)
        return execute(connection, query, *arguments, **options)

    monkeypatch.setattr(psycopg.Connection, "execute", recorded)
    return messages


def test_a_submission_is_two_round_trips(sent):
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
        first, second = sent
        assert first.startswith("BEGIN; UPDATE sequences")
        assert second.startswith("WITH ") and second.endswith("; COMMIT")
        assert store.job("j1") == a.job("j1")


def test_a_change_of_many_things_is_two_round_trips(sent):
    with contextlib.closing(open_store(postgres.fresh_url())) as store:
        store.commit(ChangeSet(new_jobs=[a.job("j1"), a.job("j2")]))
        lease = store.acquire_lease("controller", "one", timedelta(minutes=1), a.later(0))
        sent.clear()
        store.commit(
            ChangeSet(
                jobs=[a.job("j1"), a.job("j2")],
                attempts=[a.attempt()],
                slices=[a.tpu_slice()],
                events=[a.event(), a.event()],
            ),
            fence=lease,
        )
        assert len(sent) == 2
