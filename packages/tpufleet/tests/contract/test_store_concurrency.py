"""The store contract for concurrent clients: threads, servers, and processes that crash."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta

import pytest

from tests import postgres
from tests.contract import store_builders as a
from tests.polling import wait_until
from tpufleet.errors import Conflict, Fenced, FleetError, Unreachable
from tpufleet.model.fleet.hosts import HostId, HostLiveness
from tpufleet.model.people.preferences import Preferences
from tpufleet.stores.base import ChangeSet, EventQuery, JobQuery, Store
from tpufleet.stores.open_store import open_store
from tpufleet.stores.sql import schema_migrations, sqlite

TTL = timedelta(seconds=15)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request, tmp_path):
    return f"sqlite:///{tmp_path}/fleet.db" if request.param == "sqlite" else postgres.fresh_url()


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def pair(request, tmp_path):
    """Two holders: two objects on one database or, in memory, one object twice."""
    if request.param == "memory":
        store = open_store("memory:")
        yield store, store
        return
    url = f"sqlite:///{tmp_path}/fleet.db" if request.param == "sqlite" else postgres.fresh_url()
    pair = open_store(url), open_store(url)
    yield pair
    for store in pair:
        store.close()


# Leases and fencing.


def test_a_lease_has_one_holder_at_a_time(pair):
    one, two = pair
    lease = one.acquire_lease("controller", "one", TTL, a.NOW)
    assert (lease.holder, lease.expires_at) == ("one", a.NOW + TTL)
    assert two.acquire_lease("controller", "two", TTL, a.later(14.999999)) is None
    assert two.acquire_lease("something else", "two", TTL, a.NOW).holder == "two"


def test_renewal_keeps_the_token_and_takeover_increases_it(pair):
    one, two = pair
    first = one.acquire_lease("controller", "one", TTL, a.NOW)
    renewed = one.acquire_lease("controller", "one", TTL, a.later(10))
    assert (renewed.token, renewed.expires_at) == (first.token, a.later(25))
    assert two.acquire_lease("controller", "two", TTL, a.later(24)) is None
    taken = two.acquire_lease("controller", "two", TTL, a.later(25))
    assert taken.token > first.token
    assert one.acquire_lease("controller", "one", TTL, a.later(26)) is None
    back = one.acquire_lease("controller", "one", TTL, a.later(60))
    assert back.token > taken.token


def test_a_released_lease_is_free_at_once_and_its_token_is_spent(pair):
    one, two = pair
    first = one.acquire_lease("controller", "one", TTL, a.NOW)
    one.release_lease(first)
    with pytest.raises(Fenced):
        one.commit(ChangeSet(new_jobs=[a.job()]), fence=first)
    second = two.acquire_lease("controller", "two", TTL, a.later(1))
    assert second.token > first.token
    one.release_lease(first)  # too late: it is not theirs any more
    assert one.acquire_lease("controller", "one", TTL, a.later(2)) is None
    two.commit(ChangeSet(new_jobs=[a.job()]), fence=second)
    assert one.job("j1") == a.job()


def test_a_former_holder_cannot_change_a_document(pair):
    one, two = pair
    old = one.acquire_lease("reservations", "one", TTL, a.NOW)
    mine = Preferences(owner="ada")
    assert one.update_document(Preferences, "ada", lambda _: mine, fence=old) == mine
    assert two.acquire_lease("reservations", "two", TTL, a.later(20)).holder == "two"
    with pytest.raises(Fenced, match="'one'"):
        one.update_document(Preferences, "ada", lambda _: None, fence=old)
    assert two.document(Preferences, "ada") == mine


def test_a_former_holder_cannot_write(pair):
    one, two = pair
    old = one.acquire_lease("controller", "one", TTL, a.NOW)
    one.commit(ChangeSet(new_jobs=[a.job()], messages=[a.message()]), fence=old)
    new = two.acquire_lease("controller", "two", TTL, a.later(20))
    with pytest.raises(Fenced, match="'one'"):
        one.commit(
            ChangeSet(
                new_jobs=[a.job("j2")],
                jobs=[a.job(reason="old")],
                consumed=[1],
                attempts=[a.attempt()],
                events=[a.event()],
            ),
            fence=old,
        )
    assert two.job("j1") == a.job()
    assert two.job("j2") is None
    assert two.attempts("j1") == []
    assert len(two.inbox()) == 1
    assert two.last_event() == 0
    two.commit(ChangeSet(jobs=[a.job(reason="new")], consumed=[1]), fence=new)
    assert one.job("j1").reason == "new"


def test_an_expired_lease_is_valid_until_another_holder_acquires_it(pair):
    one, _ = pair
    lease = one.acquire_lease("controller", "one", TTL, a.NOW)
    again = one.acquire_lease("controller", "one", TTL, a.later(100))
    assert again.token == lease.token
    one.commit(ChangeSet(new_jobs=[a.job()]), fence=lease)
    assert one.job("j1") == a.job()


class Pausing(list):
    """Events whose writing stops half way until they are released."""

    def __init__(self, *events):
        super().__init__(events)
        self.half_way, self.go = threading.Event(), threading.Event()

    def __iter__(self):
        self.half_way.set()
        assert self.go.wait(900)
        return super().__iter__()


def test_a_lease_is_not_taken_over_during_a_fenced_commit(pair):
    one, two = pair
    lease = one.acquire_lease("controller", "one", TTL, a.NOW)
    events = Pausing(a.event())
    with ThreadPoolExecutor(2) as threads:
        committing = threads.submit(
            one.commit, ChangeSet(new_jobs=[a.job()], events=events), fence=lease
        )
        assert events.half_way.wait(900)
        taking = threads.submit(two.acquire_lease, "controller", "two", TTL, a.later(20))
        # It has to wait; a store that let it through would need far less than this.
        _, waiting = wait([taking], timeout=0.5)
        events.go.set()
        committing.result()
        assert taking.result().token > lease.token
    assert waiting == {taking}
    assert two.job("j1") == a.job()


def test_fenced_commits_and_other_commits_at_once_all_succeed(pair):
    lease = pair[0].acquire_lease("controller", "one", TTL, a.NOW)

    def commit(number):
        fence = lease if number % 2 else None
        pair[number % 2].commit(
            ChangeSet(new_jobs=[a.job(f"j{number}")], events=[a.event()]), fence=fence
        )

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(commit, range(100)))
    assert pair[0].last_event() == 100
    assert len(pair[1].jobs(JobQuery(limit=200))) == 100


def test_one_of_many_concurrent_callers_gets_the_lease(pair):
    def ask(number):
        return pair[number % 2].acquire_lease("controller", f"holder {number}", TTL, a.NOW)

    with ThreadPoolExecutor(8) as threads:
        granted = [lease for lease in threads.map(ask, range(16)) if lease]
    assert len(granted) == 1


def test_of_many_concurrent_changes_of_a_token_each_sees_the_one_before(pair):
    pair[0].put_user(a.user("ada"))
    pair[0].put_token(a.token("t1"))

    def change(number):
        append = lambda token: replace(token, note=f"{token.note}.")
        assert pair[number % 2].update_token("t1", append) is not None

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(change, range(16)))
    assert pair[0].tokens()[0].note == "." * 16
    assert pair[0].update_token("deleted", lambda token: token) is None


# Several writers.


def test_a_poller_misses_no_event_of_any_writer(pair):
    writers, commits = 4, 25
    done = threading.Event()

    def write(writer):
        for number in range(commits):
            events = [a.event(f"{writer}/{number}/{part}") for part in range(2)]
            pair[writer % 2].commit(ChangeSet(events=events, messages=[a.message()]))

    def poll():
        seen = []
        while True:
            last_round = done.is_set()
            seen += pair[0].events(EventQuery(after=seen[-1].seq if seen else 0, limit=7))
            if last_round and len(seen) == pair[0].last_event():
                return seen

    with ThreadPoolExecutor(writers + 1) as threads:
        polling = threads.submit(poll)
        for writing in [threads.submit(write, writer) for writer in range(writers)]:
            writing.result()
        done.set()
        seen = polling.result()
    assert [event.seq for event in seen] == list(range(1, writers * commits * 2 + 1))
    for writer in range(writers):
        mine = [each.message for each in seen if each.message.startswith(f"{writer}/")]
        assert mine == [f"{writer}/{n}/{part}" for n in range(commits) for part in range(2)]
    assert [each.seq for each in pair[1].inbox()] == list(range(1, writers * commits + 1))


def test_one_of_many_concurrent_submits_of_an_id_succeeds(pair):
    def submit(number):
        try:
            pair[number % 2].commit(
                ChangeSet(new_jobs=[a.job("j1", owner=f"user {number}")], events=[a.event()])
            )
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(submit, range(16))) == 1
    assert pair[0].last_event() == 1


def test_concurrent_liveness_writes_do_not_deadlock(pair):
    hosts = [f"s/{number}" for number in range(200)]

    def report(number):
        ordered = hosts if number % 2 else hosts[::-1]
        moment = a.later(number)
        pair[number % 2].record_heartbeats(
            [HostLiveness(host_id=each, seen_at=moment) for each in ordered]
        )

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(report, range(24)))
    assert pair[0].count_seen_hosts(a.NOW) == 200


def test_two_stores_on_one_database_see_each_others_writes(pair):
    one, two = pair
    one.commit(ChangeSet(new_jobs=[a.job()], events=[a.event()]))
    assert two.job("j1") == a.job()
    two.commit(ChangeSet(jobs=[a.job(reason="changed")], events=[a.event()]))
    assert one.job("j1").reason == "changed"
    assert one.last_event() == 2
    two.put_user(a.user())
    assert one.user("ada") == a.user()


def test_data_survives_closing_and_opening(url):
    store = open_store(url)
    store.commit(ChangeSet(new_jobs=[a.job()], messages=[a.message()], events=[a.event()]))
    store.close()
    with pytest.raises(FleetError, match="closed"):
        store.job("j1")
    again = open_store(url)
    assert again.job("j1") == a.job()
    again.commit(ChangeSet(messages=[a.message()], events=[a.event()]))
    assert [each.seq for each in again.inbox()] == [1, 2]
    assert again.last_event() == 2
    again.close()


# Migrations.


def test_servers_that_start_at_once_on_a_new_database_all_work(url):
    with ThreadPoolExecutor(6) as threads:
        stores = list(threads.map(lambda _: open_store(url), range(6)))
    for number, store in enumerate(stores):
        store.commit(ChangeSet(new_jobs=[a.job(f"j{number}")], events=[a.event()]))
    assert len(stores[0].jobs(JobQuery())) == 6
    assert stores[-1].last_event() == 6
    for store in stores:
        store.close()


def test_a_database_newer_than_the_code_is_refused(url, monkeypatch):
    newest = max(schema_migrations.migrations())
    future = {
        **schema_migrations.migrations(),
        newest + 1: "CREATE TABLE tomorrow (id $number PRIMARY KEY);",
    }
    with monkeypatch.context() as patch:
        patch.setattr(schema_migrations, "migrations", lambda: future)
        open_store(url).close()
    with pytest.raises(Conflict, match=f"version {newest + 1}.*up to {newest}"):
        open_store(url)


def test_a_migration_that_fails_leaves_the_database_as_it_was(url, monkeypatch):
    open_store(url).close()
    newest = max(schema_migrations.migrations())
    broken = {
        **schema_migrations.migrations(),
        newest + 1: "CREATE TABLE half (id $number PRIMARY KEY); INSERT INTO nowhere VALUES (1);",
    }
    with monkeypatch.context() as patch:
        patch.setattr(schema_migrations, "migrations", lambda: broken)
        with pytest.raises(Exception, match="nowhere"):
            open_store(url)
    fixed = {
        **schema_migrations.migrations(),
        newest + 1: "CREATE TABLE half (id $number PRIMARY KEY);",
    }
    monkeypatch.setattr(schema_migrations, "migrations", lambda: fixed)
    open_store(url).close()  # would fail if the first half had stayed


# Processes that die.

WRITER = """
    import sys, time
    from tests.contract import store_builders as a
    from tpufleet.stores.base import ChangeSet
    from tpufleet.stores.open_store import open_store

    class Slow(list):
        '''Events that take for ever to write, after the jobs were written.'''
        def __iter__(self):
            print("half way", flush=True)
            time.sleep(600)
            return super().__iter__()

    store = open_store(sys.argv[1])
    store.commit(ChangeSet(new_jobs=[a.job("whole")], events=[a.event()], messages=[a.message()]))
    store.commit(
        ChangeSet(
            new_jobs=[a.job(f"half {n}") for n in range(int(sys.argv[2]))],
            attempts=[a.attempt("half 0")],
            slices=[a.tpu_slice()],
            messages=[a.message()],
            consumed=[1],
            events=Slow([a.event()]),
        )
    )
"""


@pytest.mark.parametrize("jobs", [1, 6_000], ids=["small", "larger than the cache"])
def test_a_writer_killed_in_the_middle_of_a_commit_leaves_nothing_of_it(url, jobs):
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), url, str(jobs)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert writer.stdout.readline() == "half way\n"
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    store = open_store(url)
    assert [job.id for job in store.jobs(JobQuery())] == ["whole"]
    assert store.attempts("half 0") == []
    assert store.slices() == []
    assert [each.seq for each in store.inbox()] == [1]
    assert store.last_event() == 1
    store.commit(ChangeSet(new_jobs=[a.job("next")], events=[a.event()]))  # the lock went with it
    assert store.last_event() == 2
    store.close()


LOOP = """
    import sys
    from tests.contract import store_builders as a
    from tpufleet.stores.base import ChangeSet
    from tpufleet.stores.open_store import open_store

    store = open_store(sys.argv[1])
    for batch in range(1_000_000):
        names = [f"{batch:07}-{n}" for n in range(20)]
        store.commit(ChangeSet(new_jobs=[a.job(name, owner=f"{batch:07}") for name in names],
                            messages=[a.message(name) for name in names],
                            events=[a.event(job_id=name) for name in names]))
        print(batch, flush=True)
"""


@pytest.mark.parametrize("after", [1, 7, 20])
def test_a_writer_killed_at_any_moment_leaves_whole_commits_and_all_that_it_reported(url, after):
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LOOP), url], stdout=subprocess.PIPE, text=True
    )
    try:
        for _ in range(after):
            reported = int(writer.stdout.readline())
    finally:
        writer.send_signal(signal.SIGKILL)
        rest, _ = writer.communicate()
    reported = max([reported, *(int(line) for line in rest.split("\n")[:-1])])
    store = open_store(url)
    store.commit(ChangeSet())  # waits for a commit that the database may still be at
    jobs = store.jobs(JobQuery(limit=1_000_000))
    batches = len(jobs) // 20
    assert {job.id for job in jobs} == {f"{b:07}-{n}" for b in range(batches) for n in range(20)}
    assert batches in (reported + 1, reported + 2)
    assert len(store.inbox(limit=1_000_000)) == len(jobs)
    assert store.last_event() == len(jobs)
    store.close()


# One database each.


def test_the_sqlite_file_is_for_its_owner_only(tmp_path):
    store = open_store(f"sqlite:///{tmp_path}/new/folder/fleet.db")
    store.put_metadata("fleet", "one")
    files = list((tmp_path / "new/folder").iterdir())
    assert {stat.S_IMODE(os.stat(file).st_mode) for file in files} == {0o600}
    store.close()


def test_reading_sqlite_goes_on_while_another_process_writes(tmp_path):
    store = open_store(f"sqlite:///{tmp_path}/fleet.db")
    store.commit(ChangeSet(new_jobs=[a.job()]))
    writer = sqlite3.connect(tmp_path / "fleet.db", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("DELETE FROM jobs")
    assert store.job("j1") == a.job()
    assert store.live().jobs == [a.job()]
    writer.execute("ROLLBACK")
    writer.close()
    store.close()


def test_many_threads_on_sqlite_leave_few_connections(tmp_path):
    store = open_store(f"sqlite:///{tmp_path}/fleet.db")
    store.commit(ChangeSet(new_jobs=[a.job()]))
    for _ in range(30):
        thread = threading.Thread(target=store.job, args=("j1",))
        thread.start()
        thread.join()
    here = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    assert here.count(str(tmp_path / "fleet.db")) == 1
    store.close()


def test_postgres_connections_that_the_server_dropped_are_replaced():
    import psycopg

    url = postgres.fresh_url()
    store = open_store(url)
    store.commit(ChangeSet(new_jobs=[a.job()]))

    def drop_all():
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND application_name = 'tpufleet'"
            )

    drop_all()
    assert store.job("j1") == a.job()
    drop_all()
    store.commit(ChangeSet(new_jobs=[a.job("j2")], events=[a.event()]))
    assert store.last_event() == 1
    drop_all()
    assert len(store.live().jobs) == 2
    store.close()


def test_an_unavailable_postgres_is_unreachable_and_its_password_is_not_shown():
    pytest.importorskip("psycopg")
    with pytest.raises(Unreachable, match="database unavailable") as error:
        open_store("postgresql://ada:hush@127.0.0.1:1/fleet")
    assert "hush" not in str(error.value)


def test_without_psycopg_the_error_names_the_extra_to_install():
    script = """
        import sys
        sys.modules["psycopg"] = None
        from tpufleet.errors import BadInput
        from tpufleet.stores.open_store import open_store
        try:
            open_store("postgresql://ada@127.0.0.1/fleet")
        except BadInput as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert "tpufleet[postgres]" in done.stdout


def test_writers_of_sqlite_take_turns_in_the_order_in_which_they_came():
    """One that writes in many small steps, such as liveness, does not keep submissions waiting."""
    lock, order = sqlite._FairLock(), list[str]()

    def write(name: str) -> None:
        with lock:
            order.append(name)

    threads = []
    with lock:
        for name in ("first", "second"):
            threads.append(threading.Thread(target=write, args=(name,)))
            threads[-1].start()
            wait_until(lambda: len(lock._waiting) == len(threads))
    write("third")
    for thread in threads:
        thread.join()
    assert order == ["first", "second", "third"]


def test_liveness_moves_the_log_of_sqlite_into_the_database(tmp_path):
    """So that no commit that a client waits for does it."""
    path = tmp_path / "fleet.db"
    database = sqlite.SqliteDatabase(path, checkpoint_interval=0.0)
    with contextlib.closing(Store(database)) as store:
        store.record_heartbeats([HostLiveness(host_id=HostId("s/0"), seen_at=a.NOW)])
        before = path.stat().st_size
        store.commit(ChangeSet(new_jobs=[a.job(f"j{number}") for number in range(500)]))
        assert path.stat().st_size == before
        reports = [
            HostLiveness(host_id=HostId(f"s/{number}"), seen_at=a.NOW) for number in range(450)
        ]
        store.record_heartbeats(reports)
        assert path.stat().st_size > before
        assert len(store.last_heartbeats([each.host_id for each in reports])) == 450


# Users.


def submit_job(store, number):
    new = a.job(f"j{number}")
    store.commit(ChangeSet(new_jobs=[new], events=[a.event()], required_user="ada"))


def put_token(store, number):
    store.put_token(a.token(f"t{number}", digest=f"d{number}"))


def put_secret(store, number):
    store.put_object(f"own/ada/{number}", b"sealed", a.NOW, required_user="ada")


def put_document(store, number):
    key = f"ada {number}"
    own = Preferences(owner=key)
    store.update_document(Preferences, key, lambda _: own, required_user="ada")


def written(store):
    """All that the functions above wrote."""
    return (
        store.jobs(JobQuery(limit=100_000)),
        store.tokens(),
        store.objects("own/"),
        store.documents(Preferences),
    )


@pytest.mark.parametrize("write", [submit_job, put_token, put_secret, put_document])
def test_nothing_of_a_deleted_user_appears_after_the_deletion(pair, write):
    one, two = pair
    one.put_user(a.user("ada"))
    begun = threading.Event()

    def write_all() -> None:
        for number in range(10_000):
            try:
                write(one, number)
            except Conflict:
                return
            begun.set()

    thread = threading.Thread(target=write_all)
    thread.start()
    begun.wait(60)
    assert any(written(two))
    two.delete_user("ada")
    known = written(two)
    thread.join()
    assert written(two) == known
    assert any(known) == (write is not put_token), "tokens go with the user"


def test_of_many_concurrent_tokens_each_is_checked_against_the_ones_before(pair):
    for name in ("ada", "bob"):
        pair[0].put_user(a.user(name))
    pair[0].put_token(a.token("other", of="bob", digest="other"))

    def at_most_five(tokens):
        assert {token.user for token in tokens} <= {"ada"}
        if len(tokens) >= 5:
            raise Conflict("5 tokens")

    def put(number):
        new = a.token(f"t{number}", of="ada", digest=f"d{number}")
        try:
            pair[number % 2].put_token(new, check=at_most_five)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(put, range(16))) == 5
    assert len(pair[1].tokens("ada")) == 5


def test_parallel_writes_do_not_exceed_the_limit_of_a_prefix(pair):
    pair[0].put_user(a.user("ada"))

    def put(number: int) -> bool:
        return pair[number % 2].put_object(
            f"own/ada/{number}",
            b"sealed",
            a.NOW,
            replace=True,
            required_user="ada",
            limit=("own/ada/", 10),
        )

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(put, range(40))) == 10
    assert len(pair[1].objects("own/ada/")) == 10


def test_a_user_is_not_deleted_while_something_of_them_is_written(pair):
    one, two = pair
    one.put_user(a.user("ada"))
    half_way, go = threading.Event(), threading.Event()

    def change(_):
        half_way.set()
        assert go.wait(900)
        return Preferences(owner="ada")

    with ThreadPoolExecutor(2) as threads:
        writing = threads.submit(
            one.update_document, Preferences, "ada", change, required_user="ada"
        )
        assert half_way.wait(900)
        deleting = threads.submit(two.delete_user, "ada")
        # It has to wait; a store that let it through would need far less than this.
        _, waiting = wait([deleting], timeout=0.5)
        go.set()
        writing.result()
        deleting.result()
    assert waiting == {deleting}
    assert two.document(Preferences, "ada") == Preferences(owner="ada")
