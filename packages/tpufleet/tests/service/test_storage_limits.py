"""What jobs and uploads leave on the server's disk is bounded."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from tests.service.harness import SPEC, ServiceHarness
from tests.service.test_files import packed
from tpufleet.model.api_types import NewJob
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.job.jobs import JobId
from tpufleet.service.files.logs import LogFiles, LogGap
from tpufleet.service.operations import housekeeping

LIMIT = 10_000
HOST_0, HOST_1 = HostId("s1/0"), HostId("s1/1")


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def send(logs: LogFiles, attempt: str, host: HostId, sizes: list[int]) -> int:
    """As an agent: from where the server says."""
    offset = 0
    for size in sizes:
        offset = logs.append(AttemptId(attempt), host, offset, b"x" * size)
    return offset


def numbered(count: int) -> list[bytes]:
    return [f"line {number:06d}\n".encode() for number in range(count)]


def ship(logs: LogFiles, attempt: str, host: HostId, lines: list[bytes], batch: int = 7) -> None:
    offset = 0
    for start in range(0, len(lines), batch):
        data = b"".join(lines[start : start + batch])
        offset = logs.append(AttemptId(attempt), host, offset, data)


def text_of(logs: LogFiles, attempt: str, host: HostId, prefix: str = "") -> list[str]:
    return b"".join(logs.text(AttemptId(attempt), host, 0, prefix)).decode().splitlines()


def followed(logs: LogFiles, attempt: str, host: HostId) -> list[str]:
    lines, at = [], 0
    while batch := logs.lines(AttemptId(attempt), host, at, complete=False).lines:
        lines += [line for line, _ in batch]
        at = batch[-1][1]
    return lines


def test_at_the_limit_a_log_keeps_its_beginning_and_the_newest_lines_with_a_notice(tmp_path):
    logs, lines = LogFiles(tmp_path, LIMIT), numbered(20_000)  # 240 kB
    ship(logs, "job.0", HOST_0, lines)
    assert LIMIT // 2 < total(tmp_path) <= LIMIT
    for read in (text_of(logs, "job.0", HOST_0), followed(logs, "job.0", HOST_0)):
        assert read[0] == "line 000000" and read[-1] == "line 019999"
        at = next(i for i, line in enumerate(read) if line.startswith("[tpufleet]"))
        assert "bytes of output were deleted here" in read[at] and "(log_limit)" in read[at]
        newest = read[at + 2 :]  # the first one after it may have lost its beginning
        assert newest == [line.decode().strip() for line in lines[-len(newest) :]]
        assert len(newest) > 400
    labelled = text_of(logs, "job.0", HOST_0, "[0] ")
    assert all(line.startswith("[0] ") for line in labelled)


@pytest.mark.slow
def test_a_tail_of_a_log_at_the_limit_is_its_newest_lines(tmp_path):
    logs, lines = LogFiles(tmp_path, LIMIT), numbered(20_000)
    ship(logs, "job.0", HOST_0, lines)
    attempt, end = AttemptId("job.0"), sum(map(len, lines))
    assert logs.size(attempt, HOST_0) == end
    assert logs.tail_offset(attempt, HOST_0, 300) == end - 300 * len(lines[0])
    assert end - LIMIT < logs.tail_offset(attempt, HOST_0, 5_000) < end - LIMIT // 2


def test_the_oldest_output_of_a_job_goes_first_whichever_host_or_attempt_wrote_it(tmp_path):
    logs, lines = LogFiles(tmp_path, LIMIT), numbered(2_000)
    ship(logs, "job.0", HOST_0, lines)
    ship(logs, "job.1", HOST_1, lines)
    assert total(tmp_path) <= LIMIT
    assert text_of(logs, "job.1", HOST_1)[-600:] == [line.decode().strip() for line in lines[-600:]]
    first = text_of(logs, "job.0", HOST_0)
    assert first[-1] == "line 001999" and len(first) < 200
    ship(logs, "other.0", HOST_0, lines[:100])
    assert text_of(logs, "other.0", HOST_0) == [line.decode().strip() for line in lines[:100]]


@pytest.mark.slow
def test_a_log_at_the_limit_goes_on_after_a_restart_and_on_another_server(tmp_path):
    servers, lines, offset = [LogFiles(tmp_path, LIMIT) for _ in range(2)], numbered(5_000), 0
    for number, line in enumerate(lines):
        which = LogFiles(tmp_path, LIMIT) if number % 1_000 == 0 else servers[number % 2]
        offset = which.append(AttemptId("job.0"), HOST_0, offset, line)
    for logs in (*servers, LogFiles(tmp_path, LIMIT)):
        read = text_of(logs, "job.0", HOST_0)
        assert read[-400:] == [line.decode().strip() for line in lines[-400:]]
    with pytest.raises(LogGap):
        servers[0].append(AttemptId("job.0"), HOST_0, offset + 5, b"x")


def test_a_job_with_very_many_hosts_ends_its_logs_with_a_notice(tmp_path):
    """Nothing is left to delete but the ends that they write to."""
    logs = LogFiles(tmp_path, LIMIT)
    hosts = [HostId(f"s1/{index}") for index in range(100)]
    for host in hosts:
        assert send(logs, "job.0", host, [140]) == 140
    assert send(logs, "job.0", hosts[0], [140, 4_000]) == 4_140  # the agent never waits
    assert total(tmp_path) < LIMIT + len(hosts) * 200
    assert any("later output is not stored" in line for line in text_of(logs, "job.0", hosts[-1]))
    size = total(tmp_path)
    again = LogFiles(tmp_path, LIMIT)
    assert again.append(AttemptId("job.0"), hosts[-1], 140, b"more") == 144
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
    logs, lines = LogFiles(tmp_path, LIMIT), numbered(800)
    ship(logs, "job.0", HOST_0, lines)
    assert total(tmp_path) == sum(map(len, lines))
    assert text_of(logs, "job.0", HOST_0) == [line.decode().strip() for line in lines]
    assert followed(logs, "job.0", HOST_0) == [line.decode().strip() for line in lines]


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
