"""What jobs and uploads leave on the server's disk is bounded."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from tests.service.harness import SPEC, ServiceHarness
from tests.service.test_files import packed
from tpufleet.model.api_types import NewJob
from tpufleet.model.attempts import AttemptId
from tpufleet.model.hosts import HostId
from tpufleet.model.jobs import JobId
from tpufleet.service import housekeeping
from tpufleet.service.files.logs import LogFiles, LogGap

LIMIT = 10_000
HOST_0, HOST_1 = HostId("s1/0"), HostId("s1/1")


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.log"))


def send(logs: LogFiles, attempt: str, host: HostId, sizes: list[int]) -> int:
    """As an agent: from where the server says."""
    offset = 0
    for size in sizes:
        offset = logs.append(AttemptId(attempt), host, offset, b"x" * size)
    return offset


def test_the_logs_of_a_job_are_limited_with_a_notice(tmp_path):
    logs = LogFiles(tmp_path, LIMIT)
    assert send(logs, "job.0", HOST_0, [4_000] * 100) == 400_000  # the agent never waits
    assert send(logs, "job.1", HOST_1, [4_000] * 100) == 400_000
    assert total(tmp_path) < LIMIT + 2 * 300
    for attempt, host in (("job.0", HOST_0), ("job.1", HOST_1)):
        text = b"".join(logs.text(AttemptId(attempt), host, 0, "")).decode()
        assert text.count("the limit of this server") == 1
    assert send(logs, "other.0", HOST_0, [4_000]) == 4_000


def test_a_full_log_stays_full_on_another_server(tmp_path):
    send(LogFiles(tmp_path, LIMIT), "job.0", HOST_0, [20_000])
    size = total(tmp_path)
    again = LogFiles(tmp_path, LIMIT)
    assert again.append(AttemptId("job.0"), HOST_0, 20_000, b"more") == 20_004
    assert total(tmp_path) == size


def test_servers_on_one_folder_share_the_limit(tmp_path):
    servers = [LogFiles(tmp_path, LIMIT), LogFiles(tmp_path, LIMIT)]
    offsets = [0, 0]
    for turn in range(100):
        which = turn % 2
        offsets[which] = servers[which].append(
            AttemptId("job.0"), (HOST_0, HOST_1)[which], offsets[which], b"x" * 500
        )
    assert total(tmp_path) < LIMIT + LIMIT // 8 + 2 * 300


def test_a_log_below_the_limit_is_complete(tmp_path):
    logs = LogFiles(tmp_path, LIMIT)
    assert send(logs, "job.0", HOST_0, [LIMIT - 1, 1]) == LIMIT
    assert total(tmp_path) == LIMIT
    with pytest.raises(LogGap):
        LogFiles(tmp_path, LIMIT * 2).append(AttemptId("job.0"), HOST_0, LIMIT + 5, b"x")


def age(path: Path, service: ServiceHarness, by: timedelta) -> None:
    then = (service.clock.now() - by).timestamp()
    os.utime(path, (then, then))


def test_files_that_nothing_refers_to_are_deleted(service, tmp_path_factory):
    code = tmp_path_factory.mktemp("code")
    digests = []
    for name in ("used", "unused", "fresh", "touched"):
        (code / "train.py").write_text(name)
        digest, data = packed(code)
        service.client("mel").put_snapshot(digest, data)
        digests.append(digest)
    used, unused, fresh, touched = digests
    service.client("mel").submit([NewJob(id=JobId("job-1"), spec=SPEC, snapshot=used)])
    service.end_job("job-1")
    snapshots = service.folder / "snapshots"
    for digest in (used, unused, touched):
        age(snapshots / f"{digest}.tar.gz", service, timedelta(days=2))
    age(snapshots / f"{fresh}.tar.gz", service, timedelta(hours=2))
    drafts = [snapshots / ".upload-old", snapshots / ".upload-new"]
    for draft in drafts:
        draft.write_bytes(b"x")
    age(drafts[0], service, timedelta(days=1))
    age(drafts[1], service, timedelta(minutes=1))
    before = (snapshots / f"{touched}.tar.gz").stat().st_mtime
    assert service.client("mel").has_snapshot(touched)  # about to be submitted again
    assert (snapshots / f"{touched}.tar.gz").stat().st_mtime > before
    deleted = housekeeping.delete_orphans(service.store, service.folder, service.clock.now())
    assert {path.name for path in deleted} == {f"{unused}.tar.gz", ".upload-old"}
    left = {path.name for path in snapshots.iterdir()}
    assert left == {f"{name}.tar.gz" for name in (used, fresh, touched)} | {".upload-new"}
