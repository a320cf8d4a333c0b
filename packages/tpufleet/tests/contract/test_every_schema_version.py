"""A database of every earlier schema version, with rows in all of its tables, is migrated with
nothing lost; and the backup that is made before brings the earlier version back.

Versions up to 4 have the rows that their release wrote (`schema_4.json`). Later ones have those of
today: their columns were only added to since.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from tests import postgres
from tests.contract import store_builders as a
from tests.contract.test_schema_migrations import OLD_DATABASE
from tpufleet.model.fleet.host_commands import (
    HostCommand,
    HostCommandKind,
    HostCommandResult,
    SentHostCommand,
)
from tpufleet.model.fleet.hosts import HostLiveness, Progress
from tpufleet.model.fleet.slices import SliceState
from tpufleet.model.job.job_search import parse_search
from tpufleet.model.job.jobs import JobState
from tpufleet.model.job.metric_points import MetricPoint
from tpufleet.model.people.audit import AuditAction, AuditEntry
from tpufleet.model.people.preferences import Preferences
from tpufleet.stores.base import ChangeSet, EventQuery, FileKind, JobQuery, Store
from tpufleet.stores.open_store import open_database, open_store
from tpufleet.stores.sql import dump, schema_migrations
from tpufleet.stores.sql.database import Database, DatabaseSession

VERSIONS = list(schema_migrations.migrations())
FIRST_OF_TODAY = 5  # the rows of today are readable from here on
MANY = 5_001  # more rows than a backup reads at once
AUDITED = AuditEntry(
    at=a.NOW,
    actor="ada",
    token_id="t1",
    address="10.0.0.1",
    action=next(iter(AuditAction)),
    target="bob",
)
Tables = dict[str, tuple[list[str], list[tuple[Any, ...]]]]


def fill(store: Store) -> None:
    """Rows in every table."""
    ended = a.job("j2", at=1, state=JobState.FAILED, tags=("best",), called="eval")
    store.commit(
        ChangeSet(
            new_jobs=[
                a.job("j1", tags=("sweep",), pool="spot"),
                ended,
                a.job("j3", at=2, snapshot="d1", parent="j1", checkpoint="/c/j1"),
            ],
            attempts=[a.attempt("j1"), a.ended_attempt("j2", last_step=7)],
            slices=[
                a.tpu_slice("s1", job_id="j1"),
                a.tpu_slice("s2", state=SliceState.GONE, gone_at=a.later(7)),
            ],
            hosts=[a.host("s1", 0, boot="b"), a.host("s1", 1)],
            pools=[a.pool()],
            refusals=[a.refusal()],
            messages=[a.message()],
            events=[a.event(job_id="j1"), a.event(pool="lab", data={"reservation": "r1"})],
        )
    )
    store.mark_files_deleted(["j2"], a.later(5))
    store.record_liveness([HostLiveness(host_id="s1/0", seen_at=a.NOW, progress=Progress(step=5))])
    store.bind_agent("s1/0", "digest")
    store.record_metrics([MetricPoint(job_id="j1", at=a.NOW, step=1, values={"loss": 0.5})])
    store.update_document(Preferences, "ada", lambda _: Preferences(owner="ada"))
    store.acquire_lease("c", "me", a.later(9) - a.NOW, a.NOW)
    command = HostCommand(id="e1", kind=HostCommandKind.COMMAND, command=("date",))
    store.put_host_command(
        SentHostCommand(host_command=command, slice_id="s1", hosts=("s1/0",), sent_at=a.NOW)
    )
    store.put_host_command_result("e1", HostCommandResult(host_id="s1/0", status=0, output="x"))
    store.put_user(a.user())
    store.put_token(a.token())
    store.append_audit(AUDITED)
    store.put_object("logs/1", b"\0bytes", a.NOW)
    store.put_metadata("fleet", "f1")


def contents(store: Store) -> dict[str, Any]:
    """Everything that can be read, by the version that brought it."""
    search = lambda text: [
        job.id
        for job in store.jobs(
            JobQuery(archived=None, search=parse_search(text, caller="ada", now=a.NOW))
        )
    ]
    return {
        "1": (
            store.live(),
            [store.job(each) for each in ("j1", "j2", "j3")],
            [store.attempts(each) for each in ("j1", "j2")],
            store.events(EventQuery()),
            store.last_event(),
            store.inbox(),
            store.host_liveness(["s1/0"]),
            store.users(),
            store.tokens(),
            store.metadata("fleet"),
            store.count_jobs(),
            store.jobs(JobQuery(tag="best", archived=None)),
            [search(text) for text in ("train", "state:failed", "tag:sweep", "name:eval")],
        ),
        "2": (store.host_commands(), store.host_command_results(["e1"])),
        "4": (
            store.files_deleted_at("j2"),
            store.jobs(JobQuery()),
            store.jobs(JobQuery(archived=True)),
        ),
        "5": (
            store.referring_jobs(["code/d1", "checkpoint/j1", "checkpoint/c"]),
            store.jobs(JobQuery(archived=None, having=FileKind.FILES)),
            [store.usage(a.later(since), a.later(100)) for since in (6, 8, 10)],
        ),
        "7": (
            store.audit(),
            store.audit(token=AUDITED.token_id),
            store.audit(token=AUDITED.target),
        ),
        "12": (search("loss<1"), store.metric_points("j1")),
        "14": store.documents(Preferences),
        "18": (store.objects("logs/"), store.read_objects(["logs/1"])),
        "20": store.events(EventQuery(reservation="r1")),
    }


@pytest.fixture(params=["sqlite", "postgres"])
def new_url(request, tmp_path):
    """A function that gives the URL of an empty database, of one kind."""
    if request.param == "postgres":
        return postgres.fresh_url
    numbers = iter(range(9))
    return lambda: f"sqlite:///{tmp_path}/fleet-{next(numbers)}.db"


def rows_of(database: Database) -> Tables:
    def work(session: DatabaseSession) -> Tables:
        columns: dict[str, list[str]] = {}
        for table, column in session.rows(database.columns):
            if table in schema_migrations.table_names():
                columns.setdefault(table, []).append(column)
        return {
            table: (
                names,
                sorted(session.rows(f"SELECT {', '.join(names)} FROM {table}"), key=repr),
            )
            for table, names in columns.items()
        }

    return database.read(work)


def write_version(url: str, version: int, rows: Tables) -> Tables:
    """A database of this version with these rows, as far as its tables have them. Returns all."""
    with contextlib.closing(open_database(url)) as database:
        database.write(lambda session: schema_migrations.apply(session, database, up_to=version))
        known = {table: columns for table, (columns, _) in rows_of(database).items()}

        def work(session: DatabaseSession) -> None:
            for table, (columns, values) in rows.items():
                if table not in known or table == "migrations":
                    continue
                shared = [each for each in columns if each in known[table]]
                where = [columns.index(each) for each in shared]
                session.run(f"DELETE FROM {table}")
                marks = ", ".join("?" * len(shared))
                session.run_many(
                    f"INSERT INTO {table} ({', '.join(shared)}) VALUES ({marks})",
                    [tuple(row[index] for index in where) for row in values],
                )

        database.write(work)
        return rows_of(database)


def test_every_table_has_rows_to_migrate(new_url):
    url = new_url()
    with contextlib.closing(open_store(url)) as store:
        fill(store)
    with contextlib.closing(open_database(url)) as database:
        tables = rows_of(database)
    assert tables.keys() == schema_migrations.table_names()
    assert [table for table, (_, rows) in tables.items() if not rows] == []


@pytest.mark.parametrize("version", [each for each in VERSIONS if each >= FIRST_OF_TODAY])
def test_all_that_a_version_had_is_there_after_the_migration(new_url, version):
    url = new_url()
    with contextlib.closing(open_store(url)) as store:
        fill(store)
        expected = contents(store)
    with contextlib.closing(open_database(url)) as database:
        rows = rows_of(database)
    older = new_url()
    write_version(older, version, rows)
    with contextlib.closing(open_store(older)) as store:
        migrated = contents(store)
        for since, content in expected.items():
            if int(since) <= version:
                assert migrated[since] == content, f"of version {since}"
        store.commit(ChangeSet(new_jobs=[a.job("new", at=9)], events=[a.event()]))
        assert store.last_event() == 3


@pytest.mark.parametrize("version", [each for each in VERSIONS if each < FIRST_OF_TODAY])
def test_the_rows_of_the_first_release_are_readable_from_each_of_its_versions(new_url, version):
    url = new_url()
    old = {
        table: (content["columns"], [tuple(row) for row in content["rows"]])
        for table, content in OLD_DATABASE.items()
    }
    write_version(url, version, old)
    with contextlib.closing(open_store(url)) as store:
        assert [job.id for job in store.jobs(JobQuery(archived=None))] == ["j1"]
        assert store.attempts("j1") and store.slices() and store.hosts("s1") and store.inbox()
        assert store.events(EventQuery()) and store.users() and store.tokens() and store.pools()
        assert bool(store.host_commands()) == (version >= 2)
        assert store.bind_agent("s1/0", "new") == ("digest" if version >= 3 else "new")
        found = parse_search("train state:failed", caller="ada", now=a.NOW)
        assert [job.id for job in store.jobs(JobQuery(archived=None, search=found))] == ["j1"]
        assert store.count_jobs() == {JobState.FAILED: 1}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_backup_brings_each_version_back_as_it_was(tmp_path: Path, version):
    """There are no migrations down: the server saves the database before it migrates it."""
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("today", "older", "restored")]
    with contextlib.closing(open_store(urls[0])) as store:
        fill(store)
    with contextlib.closing(open_database(urls[0])) as database:
        rows = rows_of(database)
    before = write_version(urls[1], version, rows)
    file = io.StringIO()
    with contextlib.closing(open_database(urls[1])) as database:
        assert dump.write_dump(database, file) == version
    open_store(urls[1]).close()  # migrated
    with contextlib.closing(open_database(urls[2])) as database:
        dump.load_dump(database, file.getvalue().splitlines(), version, migrate=False)
        restored = rows_of(database)
    del before["leases"], restored["leases"]  # of the servers, not of the data
    assert restored == before


def test_tables_with_several_key_columns_are_backed_up_completely(tmp_path: Path):
    source, target = (f"sqlite:///{tmp_path}/{name}.db" for name in ("source", "target"))
    with contextlib.closing(open_store(source)) as store:
        store.commit(
            ChangeSet(new_jobs=[a.job(f"j{number}", tags=("x",)) for number in range(MANY)])
        )
        points = [(f"j{number}", 0) for number in range(MANY)]
        points += [("j0", number) for number in range(1, MANY)]
        store.record_metrics(
            [MetricPoint(job_id=job, at=a.later(at), step=1, values={}) for job, at in points]
        )
    file = io.StringIO()
    with (
        contextlib.closing(open_database(source)) as database,
        contextlib.closing(open_database(target)) as empty,
    ):
        version = dump.write_dump(database, file)
        dump.load_dump(empty, file.getvalue().splitlines(), version)
        assert rows_of(empty) == rows_of(database)
