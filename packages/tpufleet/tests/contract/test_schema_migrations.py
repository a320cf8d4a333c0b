"""A database of schema version 4, written by an earlier release, opens with all data readable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests import postgres
from tpufleet.model.events import Event, EventKind
from tpufleet.model.fleet.agent_protocol import Heartbeat
from tpufleet.model.fleet.host_commands import (
    HostCommand,
    HostCommandKind,
    HostCommandResult,
    SentHostCommand,
)
from tpufleet.model.fleet.hosts import Exit, Host, HostLiveness, Phase, Progress
from tpufleet.model.fleet.pools import CapacityRefusal, Pool
from tpufleet.model.fleet.slices import SliceState, TpuSlice
from tpufleet.model.inbox import InboxMessage, InboxMessageKind
from tpufleet.model.job.attempts import Attempt, AttemptState
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import Capacity, Job, JobSpec, JobState, ParentRelation, Rule
from tpufleet.model.people.users import Role, Token, User
from tpufleet.stores.base import ChangeSet, EventQuery, JobQuery
from tpufleet.stores.open_store import open_store
from tpufleet.stores.sql import schema_migrations
from tpufleet.stores.sql.postgres import PostgresDatabase
from tpufleet.stores.sql.sqlite import SqliteDatabase

# Every table of a store of the release before migration 5, with its rows.
OLD_DATABASE = json.loads(Path(__file__).with_name("schema_4.json").read_text())
NOW = datetime(2026, 1, 1, tzinfo=UTC)
EXIT = Exit(
    at=NOW,
    status=1,
    stopped_by_agent=True,
    evidence=EndReason.OUT_OF_HBM,
    log_line="RESOURCE_EXHAUSTED",
)


def write_old_database(database, copies: int, cleaned: Sequence[str] = ()) -> None:
    def work(session):
        session.run("CREATE TABLE migrations (number INTEGER PRIMARY KEY)")
        for number in range(1, 5):
            for statement in schema_migrations.statements(
                schema_migrations.migrations()[number], database
            ):
                session.run(statement)
        session.run("DELETE FROM numbers")
        for table, content in OLD_DATABASE.items():
            columns = content["columns"]
            session.run_many(
                f"INSERT INTO {table} ({', '.join(columns)}) "
                f"VALUES ({', '.join('?' * len(columns))})",
                [tuple(row) for row in content["rows"]],
            )
        session.run_many(
            "INSERT INTO cleaned_jobs (job_id, at) VALUES (?, ?)",
            [(job_id, int(NOW.timestamp() * 1_000_000)) for job_id in cleaned],
        )
        event = OLD_DATABASE["events"]["rows"][0]
        session.run_many(
            "INSERT INTO events (seq, job_id, slice_id, data) VALUES (?, ?, ?, ?)",
            [
                (seq, *event[1:3], event[3].replace('"seq":1', f'"seq":{seq}'))
                for seq in range(2, copies + 1)
            ],
        )

    database.write(work)
    database.close()


@pytest.fixture(params=["sqlite", "postgres"])
def old_database(request, tmp_path):
    if request.param == "sqlite":
        return SqliteDatabase(tmp_path / "fleet.db"), f"sqlite:///{tmp_path}/fleet.db"
    url = postgres.fresh_url()
    return PostgresDatabase(url), url


def test_every_object_of_the_previous_schema_is_readable(old_database):
    database, url = old_database
    write_old_database(database, copies=1)
    store = open_store(url)
    job = Job(
        id="j1",
        spec=JobSpec(
            name="train",
            command=("python", "train.py"),
            accelerator="v5litepod-16",
            pool="lab",
            tags=("sweep",),
            timeout=timedelta(hours=2),
            rule=Rule.PRE,
        ),
        owner="ada",
        submitted_at=NOW,
        state=JobState.FAILED,
        reason="out of memory",
        parent="j0",
        parent_relation=ParentRelation.RESUME,
        ended_at=NOW,
        end_reason=EndReason.OUT_OF_HBM,
        advice="use a smaller batch",
    )
    assert store.job("j1") == job
    assert store.attempts("j1") == [
        Attempt(
            id="j1.0",
            job_id="j1",
            number=0,
            slices=("s1",),
            created_at=NOW,
            state=AttemptState.ENDED,
            running_at=NOW,
            stopping_at=NOW,
            stop_reason=EndReason.HUNG,
            ended_at=NOW,
            end_reason=EndReason.OUT_OF_HBM,
            message="host 0 of s1 failed first",
            failed_host="s1/0",
            start_step=1,
            checkpoint_step=2,
            last_step=3,
        )
    ]
    assert store.slices() == [
        TpuSlice(
            id="s1",
            provider="local",
            accelerator="v5litepod-16",
            zone="local-a",
            capacity=Capacity.SPOT,
            request_group="o1",
            requested_at=NOW,
            pool="lab",
            job_id="j1",
            state=SliceState.READY,
            reason="ready",
            up_at=NOW,
            ready_at=NOW,
        )
    ]
    report = {
        "address": "10.0.0.1",
        "coordinator_port": 8476,
        "boot": "b",
        "attempt_id": "j1.0",
        "phase": Phase.EXITED,
        "exit": EXIT,
    }
    assert store.hosts("s1") == [
        Host(id="s1/0", slice_id="s1", index=0, up_at=NOW, **report),
        Host(id="s1/1", slice_id="s1", index=1),
    ]
    assert store.inbox() == [
        InboxMessage(
            kind=InboxMessageKind.HEARTBEAT,
            at=NOW,
            heartbeat=Heartbeat(host_id="s1/0", at=NOW, **report),
            seq=1,
        ),
        InboxMessage(kind=InboxMessageKind.CANCEL, at=NOW, by="ada", job_id="j1", seq=2),
    ]
    assert store.refusals() == [
        CapacityRefusal(
            provider="local",
            zone="local-a",
            accelerator="v5litepod-16",
            capacity=Capacity.SPOT,
            message="out of stock",
            refused_at=NOW,
            until=NOW,
        )
    ]
    assert store.events(EventQuery()) == [
        Event(
            at=NOW,
            kind=EventKind.JOB,
            state="failed",
            message="it failed",
            job_id="j1",
            by="ada",
            seq=1,
        )
    ]
    repair = HostCommand(id="e1", kind=HostCommandKind.REPAIR)
    date = HostCommand(id="e2", kind=HostCommandKind.COMMAND, command=("date",))
    assert store.host_commands() == [
        SentHostCommand(host_command=command, slice_id="s1", hosts=("s1/0",), sent_at=NOW)
        for command in (repair, date)
    ]
    assert store.host_command_results(["e1"]) == {
        "e1": [
            HostCommandResult(
                host_id="s1/0", status=None, output="", truncated=True, message="took too long"
            )
        ]
    }
    assert store.host_liveness(["s1/0"]) == {
        "s1/0": HostLiveness(
            host_id="s1/0", seen_at=NOW, attempt_id="j1.0", progress=Progress(step=5)
        )
    }
    assert store.pool("lab") == Pool(
        name="lab", provider="local", accelerator="v5litepod-16", largest=4
    )
    assert store.users() == [User(name="ada", role=Role.MEMBER, created_at=NOW)]
    assert store.tokens() == [Token(id="t1", user="ada", hash="d", created_at=NOW)]
    assert store.metadata("fleet") == "f1"
    assert store.bind_agent("s1/0", "another") == "digest"
    store.commit(ChangeSet(events=[Event(at=NOW, kind=EventKind.JOB, state="x", message="new")]))
    assert store.last_event() == 2
    store.close()


def test_jobs_that_were_cleaned_are_archived_and_have_no_files(old_database):
    database, url = old_database
    write_old_database(database, copies=1, cleaned=["j1"])
    store = open_store(url)
    assert store.jobs(JobQuery()) == []
    assert [job.id for job in store.jobs(JobQuery(archived=True))] == ["j1"]
    assert store.files_deleted_at("j1") == NOW
    store.close()


def test_tables_of_several_batches_are_migrated_completely(old_database):
    database, url = old_database
    write_old_database(database, copies=12_001)
    store = open_store(url)
    events = store.events(EventQuery(limit=20_000))
    assert [event.seq for event in events] == list(range(1, 12_002))
    assert {event.message for event in events} == {"it failed"}
    store.close()
    open_store(url).close()  # applied once only
