"""However long the history is, archiving, purging and the rules of retention read only the jobs
that they are about."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.contract import store_builders as a
from tpufleet.model.api_types import JobSelection
from tpufleet.model.job.jobs import JobId, JobState
from tpufleet.model.people.retention_rules import RetentionRules
from tpufleet.model.people.users import Role
from tpufleet.service.files.job_files import JobFiles
from tpufleet.service.files.snapshots import SnapshotFiles
from tpufleet.service.jobs.commands import CommandContext
from tpufleet.service.operations import archiving, housekeeping, retention_rules
from tpufleet.service.transport.auth import Caller
from tpufleet.stores.base import ChangeSet, Store, code_reference
from tpufleet.stores.open_store import open_store

HISTORY = 3_000  # ended jobs, whose files were deleted long ago
RECENT = 50  # jobs with files
DAY = timedelta(days=1)
NOW = a.NOW + 1000 * DAY
CODE = "c" * 64


class CountingStore:
    """Passes every call to a real store, and counts the jobs that it reads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.jobs_read = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.jobs_read += len(result) if name in ("jobs", "jobs_like") else name == "job"
            return result

        return call


@pytest.fixture(scope="module")
def history(tmp_path_factory) -> Path:
    """A database that each test copies."""
    path = tmp_path_factory.mktemp("history") / "fleet.db"
    store = open_store(f"sqlite:///{path}")
    ended = {"state": JobState.SUCCEEDED, "snapshot": CODE}
    ids = [f"old-{number:05}" for number in range(HISTORY)]
    for start in range(0, HISTORY, 1000):
        jobs = [
            a.job(name, at=number, ended_at=a.later(number + 9), **ended)
            for number, name in enumerate(ids[start : start + 1000], start)
        ]
        store.commit(ChangeSet(new_jobs=jobs))
    store.mark_files_deleted([JobId(name) for name in ids], a.later(HISTORY))
    at = 900 * DAY.total_seconds()
    jobs = [
        a.job(f"new-{n}", at=at + n, ended_at=a.later(at + n + 9), **ended) for n in range(RECENT)
    ]
    chain = [
        a.job("child-1", at=at + 99, parent="new-0", ended_at=a.later(at + 100), **ended),
        a.job("child-2", at=at + 101, parent="child-1", ended_at=a.later(at + 102), **ended),
        a.job("live", at=at + 200, parent="new-1", snapshot=CODE),
    ]
    store.commit(ChangeSet(new_jobs=[*jobs, *chain]))
    store.close()
    return path


@pytest.fixture
def store(history: Path, tmp_path: Path) -> Iterator[CountingStore]:
    path = tmp_path / "fleet.db"
    path.write_bytes(history.read_bytes())
    opened = open_store(f"sqlite:///{path}")
    yield CountingStore(opened)
    opened.close()


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    return JobFiles(state=tmp_path, snapshots=SnapshotFiles(tmp_path / "snapshots"))


def context(store: CountingStore) -> CommandContext:
    return CommandContext(store=store, caller=Caller(name="ada", role=Role.ADMIN), now=NOW)  # type: ignore[arg-type]


@contextmanager
def few_jobs_read(store: CountingStore, most: int = 4 * RECENT) -> Iterator[None]:
    store.jobs_read = 0
    yield
    assert store.jobs_read <= most


def test_a_named_job_is_archived_without_its_lineage(store):
    with few_jobs_read(store, 20):
        page = archiving.archive(context(store), JobSelection(jobs=("child-1",)))
    assert {row.id for row in page.jobs} == {"child-1"}


def test_old_code_is_purged_lineage_by_lineage(store, files):
    rules = RetentionRules(logs=None, code=50 * DAY, events=None)
    with few_jobs_read(store, 8 * RECENT):
        # "new-1" was resumed by a job that is live.
        assert retention_rules.apply(store, files, rules, NOW)["code"] == RECENT + 1
    with few_jobs_read(store, 20):
        assert retention_rules.apply(store, files, rules, NOW + timedelta(hours=1))["code"] == 0


@pytest.mark.parametrize(
    "rules",
    [
        RetentionRules(),
        RetentionRules(logs=30 * DAY, checkpoints=30 * DAY),
    ],
    ids=["default", "30 days"],
)
def test_the_hourly_rules(store, files, rules):
    """The second time, nothing of what was done is read again."""
    retention_rules.apply(store, files, rules, NOW)
    for hour in (1, 2):
        with few_jobs_read(store):
            retention_rules.apply(store, files, rules, NOW + timedelta(hours=hour))


def test_code_that_is_needed_or_not(store, files, tmp_path):
    folder = tmp_path / "snapshots"
    folder.mkdir()
    for digest in (CODE, "d" * 64):
        (folder / f"{digest}.tar.gz").write_text("code")
        os.utime(folder / f"{digest}.tar.gz", (0, 0))
    with few_jobs_read(store, 0):
        [deleted] = housekeeping.delete_orphans(store, tmp_path, NOW)
    assert deleted.name.startswith("ddd")
    assert store.referred([code_reference(CODE), code_reference("e")]) == {code_reference(CODE)}
