"""A store with rows in every table, and all that can be read of it."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from typing import Any

from tests.contract import store_builders as a
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
    store.record_heartbeats(
        [HostLiveness(host_id="s1/0", seen_at=a.NOW, progress=Progress(step=5))]
    )
    store.register_agent("s1/0", "digest")
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
    store.put_object("logs/1", bytes(range(256)), a.NOW)
    store.put_metadata("fleet", "f1")
    store.put_metadata("note", 'ünïcode \\ " line\nbreak')


def contents(store: Store) -> tuple[object, ...]:
    def search(text: str) -> list[str]:
        search = parse_search(text, caller="ada", now=a.NOW)
        return [job.id for job in store.jobs(JobQuery(archived=None, search=search))]

    searches = ("train", "state:failed", "tag:sweep", "name:eval", "loss<1")
    return (
        store.live(),
        store.jobs(JobQuery(archived=None)),
        store.jobs(JobQuery(archived=True)),
        store.jobs(JobQuery(tag="best", archived=None)),
        store.jobs(JobQuery(archived=None, having=FileKind.FILES)),
        [search(text) for text in searches],
        store.count_jobs(),
        store.files_deleted_at("j2"),
        store.referring_jobs(["code/d1", "checkpoint/j1", "checkpoint/c"]),
        [store.attempts(each) for each in ("j1", "j2")],
        [store.usage(a.later(since), a.later(100)) for since in (6, 8, 10)],
        store.events(EventQuery()),
        store.events(EventQuery(reservation="r1")),
        store.last_event(),
        store.inbox(),
        store.last_heartbeats(["s1/0"]),
        store.register_agent("s1/0", "another"),
        store.host_commands(),
        store.host_command_results(["e1"]),
        store.metric_points("j1"),
        store.documents(Preferences),
        store.users(),
        store.tokens(),
        store.audit(),
        store.audit(token=AUDITED.token_id),
        store.audit(token=AUDITED.target),
        store.objects("logs/"),
        store.read_objects(["logs/1"]),
        store.metadata("note"),
    )


def rows_of(database: Database) -> Tables:
    def work(session: DatabaseSession) -> Tables:
        columns: dict[str, list[str]] = {}
        for table, column in session.rows(database.columns):
            if table in schema_migrations.key_sizes():
                columns.setdefault(table, []).append(column)
        return {
            table: (
                names,
                sorted(session.rows(f"SELECT {', '.join(names)} FROM {table}"), key=repr),
            )
            for table, names in columns.items()
        }

    return database.read(work)


def main() -> None:
    """Write the dump of a store of this release to standard output."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as file:
        url = f"sqlite:///{folder}/fleet.db"
        with contextlib.closing(open_store(url)) as store:
            fill(store)
        with contextlib.closing(open_database(url)) as database:
            dump.write_dump(database, file)
        file.seek(0)
        shutil.copyfileobj(file, sys.stdout)


if __name__ == "__main__":
    main()
