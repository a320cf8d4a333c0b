"""A Postgres that does not respond: calls end within a bound, also that of stopping the server."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from tests import postgres
from tests.contract import store_builders as a
from tests.frozen_postgres import FreezingProxy
from tests.polling import wait_until
from tests.server_process import Server
from tpufleet.errors import Unreachable
from tpufleet.stores.base import ChangeSet, JobQuery
from tpufleet.stores.sql.outage_log import REPEAT_SECONDS
from tpufleet.stores.sql.postgres import PostgresDatabase, Timeouts, open_postgres

SHORT = Timeouts(connect=1, lock=0.5, statement=1.0, response=1.5)
# A call waits for a response that never comes, and for an attempt to connect again: five seconds,
# or many more on a machine with other things to do. Without timeouts it would wait forever.
BOUND = 30
CALLS = {
    "read": lambda store: store.jobs(JobQuery()),
    "snapshot": lambda store: store.live(),
    "write": lambda store: store.put_metadata("name", "value"),
    "commit": lambda store: store.commit(ChangeSet(new_jobs=[a.job("frozen")])),
    "lease": lambda store: store.acquire_lease("c", "me", timedelta(seconds=9), a.NOW),
}


@pytest.fixture
def proxy() -> Iterator[FreezingProxy]:
    proxy = FreezingProxy()
    yield proxy
    proxy.close()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_to_a_frozen_database_fails_in_time_and_works_after_it(proxy, call):
    store = open_postgres(proxy.url, SHORT)
    store.jobs(JobQuery())
    proxy.freeze()
    started = time.monotonic()
    with pytest.raises(Unreachable):
        call(store)
    assert time.monotonic() - started < BOUND
    proxy.thaw()
    assert wait_until(lambda: _answers(store))
    store.close()


def _answers(store) -> bool:
    try:
        store.jobs(JobQuery())
    except Unreachable:
        return False
    return True


def test_many_calls_to_a_frozen_database_do_not_queue_up(proxy):
    """More calls than a server has threads, on fewer threads: they fail at once after the first."""
    store = open_postgres(proxy.url, SHORT)
    store.jobs(JobQuery())
    proxy.freeze()
    started = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: _answers(store), range(2000)))
    assert not any(answers)
    assert time.monotonic() - started < 2 * BOUND
    store.close()


def test_a_lock_that_another_client_holds_is_not_waited_for_forever(proxy):
    import psycopg

    url = postgres.fresh_url()
    store = open_postgres(url, SHORT)
    with psycopg.connect(url) as other:
        other.execute("UPDATE sequences SET events = events WHERE id = 1")
        started = time.monotonic()
        with pytest.raises(Unreachable, match="lock timeout"):
            store.commit(ChangeSet(events=[a.event()]))
        assert time.monotonic() - started < BOUND
    assert wait_until(lambda: _answers(store))
    store.close()


def test_a_statement_that_takes_too_long_is_ended():
    database = PostgresDatabase(postgres.fresh_url(), SHORT)
    with pytest.raises(Unreachable, match="statement timeout"):
        database.read(lambda session: session.rows("SELECT pg_sleep(60)"))
    database.close()


def test_migrations_may_take_longer_than_other_statements():
    database = PostgresDatabase(postgres.fresh_url(), SHORT)

    def migrate(session) -> None:
        session.run(database.migration_lock)
        session.rows("SELECT pg_sleep(2)")

    database.write(migrate)
    database.close()


def test_leases_are_compared_by_the_clock_of_the_database():
    store = open_postgres(postgres.fresh_url())
    shared = store.time()
    assert shared is not None
    assert abs(shared - datetime.now(UTC)) < timedelta(minutes=1)
    store.close()


@pytest.mark.slow
def test_a_server_logs_an_outage_of_its_database_in_a_few_lines(proxy, tmp_path):
    server = Server(tmp_path, TPUFLEET_STORE=proxy.url)
    server.start()
    log = tmp_path / "server.log"
    try:
        proxy.freeze()
        frozen_at = time.monotonic()
        assert wait_until(lambda: "does not respond; retrying" in log.read_text())
        for _ in range(100):
            answer = httpx.get(f"{server.url}/readyz", timeout=900, trust_env=False)
            assert answer.status_code == 503
        proxy.thaw()
        assert wait_until(lambda: "responds again" in log.read_text())
        minutes = (time.monotonic() - frozen_at) / REPEAT_SECONDS
    finally:
        server.cleanup()
    lines = log.read_text().splitlines()
    assert not [line for line in lines if line.startswith("Traceback")]
    repeated = [line for line in lines if "the database does not respond; retrying" in line]
    assert 1 <= len(repeated) <= 1 + minutes, "\n".join(repeated)
    assert sum("the database responds again" in line for line in lines) == 1
    warnings = [line for line in lines if "WARNING" in line or "ERROR" in line]
    # The longer it lasts on a loaded machine, the more parts of the server say what they miss.
    assert len(warnings) <= 10, "\n".join(warnings)


@pytest.mark.slow
def test_sigterm_ends_a_server_whose_database_is_frozen(proxy, tmp_path):
    """At the default settings, with requests and heartbeats waiting."""
    server = Server(tmp_path, TPUFLEET_STORE=proxy.url)
    server.start()
    proxy.freeze()
    headers = {"Authorization": f"Bearer {(tmp_path / 'token').read_text().strip()}"}
    with ThreadPoolExecutor(4) as threads:
        asked = [
            threads.submit(
                httpx.get,
                f"{server.url}/api/v1/jobs",
                headers=headers,
                timeout=900,
                trust_env=False,
            )
            for _ in range(4)
        ]
        statuses = {future.result().status_code for future in asked}
    assert statuses == {503}, "answered in spite of the frozen database"
    started = time.monotonic()
    assert server.stop() in (0, -signal.SIGTERM)
    assert time.monotonic() - started < 30
