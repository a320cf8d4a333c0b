"""The retention rules of a server, on real files and a real store."""

from __future__ import annotations

import logging
import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.nested_folders import make_nested, refuse_to_delete
from tests.service.harness import ServiceHarness
from tests.service.test_files import packed
from tpufleet.clocks import ManualClock
from tpufleet.model.api_types import NewJob
from tpufleet.model.job.jobs import JobId
from tpufleet.model.people.retention_rules import RetentionRules
from tpufleet.service.files.job_files import JobFiles
from tpufleet.service.files.snapshots import SnapshotFiles
from tpufleet.service.operations import housekeeping, retention_rules
from tpufleet.service.operations.recent_errors import RecentErrors
from tpufleet.stores.base import EventQuery
from tpufleet.stores.memory import MemoryStore

DAY = timedelta(days=1)
KEEP_ALL = RetentionRules(logs=None, code=None, checkpoints=None, events=None)


def job_with_files(service: ServiceHarness, name: str, *, size: int = 100, ended: bool = True):
    service.submit(name)
    for kind in ("logs", "checkpoints"):
        folder = service.folder / kind / name / "0"
        folder.mkdir(parents=True)
        (folder / "file.log").write_bytes(b"x" * size)
    if ended:
        service.end_job(name)


def apply(service: ServiceHarness, **rules: timedelta | None) -> dict[str, int]:
    service.clock.advance(timedelta(hours=1))
    files = JobFiles(state=service.folder, snapshots=SnapshotFiles(service.folder / "snapshots"))
    wanted = RetentionRules(**{**dict(logs=None, code=None, events=None), **rules})
    return retention_rules.apply(service.store, files, wanted, service.clock.now())


def left(service: ServiceHarness, kind: str) -> set[str]:
    return {path.name for path in (service.folder / kind).iterdir()}


def messages(service: ServiceHarness, job: str) -> list[str]:
    return [event.message for event in service.store.events(EventQuery(job_id=JobId(job)))]


@pytest.mark.parametrize("kind", ["logs", "checkpoints"])
def test_files_of_jobs_that_ended_long_ago_are_deleted_with_an_event(service, kind):
    job_with_files(service, "old")
    job_with_files(service, "live", ended=False)
    service.clock.advance(31 * DAY)
    job_with_files(service, "new")
    assert apply(service, **{kind: 30 * DAY})[kind] == 1
    assert left(service, kind) == {"live", "new"}
    other = {"logs": "checkpoints", "checkpoints": "logs"}[kind]
    assert left(service, other) == {"old", "live", "new"}
    reason = f"older than 30 days (retention.{kind})"
    assert messages(service, "old")[-1] == f"{kind} deleted: {reason}"
    assert apply(service, **{kind: 30 * DAY})[kind] == 0


@pytest.mark.parametrize("levels", [1500, 3000])
def test_deeply_nested_checkpoints_are_measured_and_deleted(service, levels):
    job_with_files(service, "deep", size=1000)
    make_nested(service.folder / "checkpoints" / "deep", levels, file=b"x" * 5000)
    service.clock.advance(DAY)
    job_with_files(service, "new", size=1000)
    assert apply(service, checkpoints=DAY / 2)["checkpoints"] == 1
    assert left(service, "checkpoints") == {"new"}


@pytest.mark.parametrize("kind", ["logs", "checkpoints"])
def test_files_that_cannot_be_deleted_do_not_keep_those_of_other_jobs(service, kind, monkeypatch):
    for name in ("stuck", "other"):
        job_with_files(service, name)
        service.clock.advance(DAY)
    (service.folder / kind / "stuck" / "busy").mkdir()
    file = service.folder / kind / "stuck" / "busy" / "file"
    file.write_bytes(b"1")
    refuse_to_delete("busy", monkeypatch)
    service.clock.advance(31 * DAY)
    rule = {kind: 30 * DAY}
    assert apply(service, **rule)[kind] == 1
    assert left(service, kind) == {"stuck"}
    failed = (
        f"some {kind} could not be deleted: Device or resource busy; retrying every hour: "
        f"older than 30 days (retention.{kind})"
    )
    assert messages(service, "stuck")[-1] == failed
    assert messages(service, "other")[-1].startswith(f"{kind} deleted: ")
    file.write_bytes(b"1")
    apply(service, **rule)
    assert [each for each in messages(service, "stuck") if "deleted" in each] == [failed]
    file.write_bytes(b"1")
    monkeypatch.undo()
    assert apply(service, **rule)[kind] == 1
    assert messages(service, "stuck")[-1].startswith(f"{kind} deleted: ")


class BrokenStore(MemoryStore):
    """Fails as no task expects."""

    def referred(self, references):
        raise RecursionError("too deep")

    def acquire_lease(self, *arguments, **options):
        raise ValueError("invalid")


def test_an_unexpected_error_of_one_task_is_listed_and_the_others_go_on(tmp_path):
    recent = RecentErrors()
    logger = logging.getLogger("tpufleet.service.operations.housekeeping")
    logger.addHandler(recent)
    files = JobFiles(state=tmp_path, snapshots=SnapshotFiles(tmp_path / "snapshots"))
    stopping = threading.Event()
    stopping.set()  # after the first pass
    try:
        housekeeping.run_until(stopping, BrokenStore(), files, KEEP_ALL, ManualClock())
    finally:
        logger.removeHandler(recent)
    assert [each.message for each in recent.list(datetime.now(UTC))] == [
        "cannot apply the retention rules; retrying: ValueError('invalid')",
        "cannot delete unused files; retrying: RecursionError('too deep')",
    ]


def test_checkpoints_of_a_lineage_are_kept_while_one_of_its_jobs_is_live_or_recent(service):
    job_with_files(service, "parent")
    service.client("mel").resume("parent", job_id="child")
    service.clock.advance(100 * DAY)
    rule = 30 * DAY
    assert apply(service, checkpoints=rule)["checkpoints"] == 0
    service.end_job("child")
    assert apply(service, checkpoints=rule)["checkpoints"] == 0
    service.clock.advance(31 * DAY)
    assert apply(service, checkpoints=rule)["checkpoints"] == 1
    assert left(service, "checkpoints") == set()


def test_old_code_is_purged_and_the_job_says_so(service, tmp_path_factory):
    code = tmp_path_factory.mktemp("code")
    (code / "train.py").write_text("print(1)")
    digest, data = packed(code)
    with service.http(service.tokens["mel"]) as http:
        assert http.put(f"/snapshots/{digest}", content=data).status_code == 200
    spec = {"name": "x", "command": ["true"], "accelerator": "v5litepod-16"}
    service.client("mel").submit([NewJob(id=JobId("job-1"), spec=spec, snapshot=digest)])
    service.end_job("job-1")
    service.clock.advance(366 * DAY)
    assert apply(service, code=RetentionRules().code)["code"] == 1
    assert not list((service.folder / "snapshots").glob("*.tar.gz"))
    assert messages(service, "job-1")[-1] == "purged by retention: deleted logs, results and code"


def test_old_events_are_deleted_except_those_of_live_jobs(service):
    service.submit("old")
    service.end_job("old")
    service.submit("live")
    service.clock.advance(400 * DAY)
    service.submit("new")
    before = service.store.last_event()
    assert apply(service, events=RetentionRules().events)["events"] >= 1
    assert {event.job_id for event in service.store.events(EventQuery())} == {"live", "new"}
    assert service.store.last_event() == before  # numbers are never used again


def test_one_server_at_a_time_applies_the_rules(service):
    assert apply(service) != {}
    files = JobFiles(state=service.folder, snapshots=SnapshotFiles(service.folder / "snapshots"))
    assert retention_rules.apply(service.store, files, KEEP_ALL, service.clock.now()) == {}


def test_the_code_of_an_archived_job_is_kept(service, tmp_path_factory):
    code = tmp_path_factory.mktemp("code")
    (code / "train.py").write_text("print(2)")
    digest, data = packed(code)
    with service.http(service.tokens["mel"]) as http:
        http.put(f"/snapshots/{digest}", content=data)
    spec = {"name": "x", "command": ["true"], "accelerator": "v5litepod-16"}
    service.client("mel").submit([NewJob(id=JobId("job-1"), spec=spec, snapshot=digest)])
    service.end_job("job-1")
    service.store.archive([JobId("job-1")])
    service.clock.advance(10 * DAY)
    path = next(Path(service.folder / "snapshots").glob("*.tar.gz"))
    os.utime(path, (0, 0))
    assert housekeeping.delete_orphans(service.store, service.folder, service.clock.now()) == []
