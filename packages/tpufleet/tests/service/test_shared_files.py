"""Several servers with disks of their own: what one stores, the others have."""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests import postgres
from tpufleet.clocks import ManualClock
from tpufleet.errors import Conflict, NotFound
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.job.jobs import JobId
from tpufleet.model.people.users import Role, User
from tpufleet.service.files import secrets as secrets_module
from tpufleet.service.files.bucket_files import ArchivedLogs
from tpufleet.service.files.job_files import JobFiles
from tpufleet.service.files.logs import LogGap
from tpufleet.service.files.results import ResultFiles
from tpufleet.service.files.secrets import JobSecrets, derived_key
from tpufleet.service.files.shared_logs import IDLE_AFTER, MIN_AGE, SharedLogs
from tpufleet.service.files.snapshots import SnapshotFiles
from tpufleet.stores.open_store import open_store

ATTEMPT, HOST = AttemptId("job.0"), HostId("slice-a/0")
ADA = User(name="ada", role=Role.MEMBER, created_at=datetime(2026, 1, 1, tzinfo=UTC))


@dataclass(frozen=True)
class Size:
    size: int


class MemoryArchive:
    """The operations of a bucket."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def has(self, name: str) -> bool:
        return name in self.objects

    def names(self, prefix: str = "") -> Mapping[str, Size]:
        return {
            name: Size(len(data)) for name, data in self.objects.items() if name.startswith(prefix)
        }

    def create(self, name: str, path: Path) -> bool:
        if name in self.objects:
            return False
        self.objects[name] = path.read_bytes()
        return True

    def upload(self, name: str, path: Path) -> None:
        self.objects[name] = path.read_bytes()

    def download(self, name: str, path: Path) -> None:
        if name not in self.objects:
            raise NotFound(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.objects[name])

    def read(self, name: str) -> bytes:
        return self.objects[name]

    def write(self, name: str, data: bytes) -> None:
        self.objects[name] = data

    def delete(self, names: list[str]) -> None:
        for name in names:
            self.objects.pop(name, None)


@pytest.fixture
def clock():
    return ManualClock(datetime(2026, 1, 1, tzinfo=UTC))


@pytest.fixture
def archive():
    return MemoryArchive()


@pytest.fixture(params=["memory", "postgres"])
def store(request):
    store = open_store("memory:" if request.param == "memory" else postgres.fresh_url())
    yield store
    store.close()


def whole(logs):
    return b"".join(logs.text(ATTEMPT, HOST, 0, ""))


def test_a_log_that_moves_between_servers_has_no_gap_and_no_repetition(store, archive, clock):
    first, second = (SharedLogs(store, archive, clock) for _ in range(2))
    assert first.append(ATTEMPT, HOST, 0, b"one\n") == 4
    assert second.append(ATTEMPT, HOST, 4, b"two\n") == 8
    assert first.append(ATTEMPT, HOST, 4, b"two\nthree\n") == 14, "sent again after a lost response"
    with pytest.raises(LogGap) as gap:
        second.append(ATTEMPT, HOST, 99, b"far")
    assert gap.value.size == 14
    assert whole(first) == whole(second) == b"one\ntwo\nthree\n"
    assert second.tail_offset(ATTEMPT, HOST, 1) == 8


def test_servers_that_append_at_once_lose_and_repeat_nothing(store, archive, clock):
    """As when an agent's request to one server times out and it sends the bytes to another."""
    servers = [SharedLogs(store, archive, clock) for _ in range(2)]
    content = bytes(random.Random(3).randrange(32, 127) for _ in range(20_000))

    def ship(logs):
        offset = 0
        while offset < len(content):
            try:
                offset = logs.append(ATTEMPT, HOST, offset, content[offset : offset + 777])
            except LogGap as gap:
                offset = gap.size

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ship, servers * 2))
    assert [logs.size(ATTEMPT, HOST) for logs in servers] == [len(content)] * 2
    assert servers[0].read(ATTEMPT, HOST, 0, len(content)) == content


def test_old_parts_move_to_the_bucket_and_are_read_from_there(store, archive, clock):
    first, second = (SharedLogs(store, archive, clock) for _ in range(2))
    lines = [f"{number:07d} {'x' * 500}\n".encode() for number in range(9_000)]
    content, offset = b"".join(lines), 0
    for start in range(0, len(content), 200_000):
        offset = first.append(ATTEMPT, HOST, offset, content[start : start + 200_000])
    assert first.compact() == 0, "younger than a minute"
    clock.advance(MIN_AGE)
    assert first.compact() == 3
    assert all(2**20 <= len(data) < 2**21 for data in archive.objects.values())
    kept = sum(each.size for each in store.objects("logs/"))
    assert 0 < kept < 2**20
    assert second.size(ATTEMPT, HOST) == len(content)
    assert second.read(ATTEMPT, HOST, 0, len(content)) == content
    middle = 2_345_678
    assert second.read(ATTEMPT, HOST, middle, 100_000) == content[middle : middle + 100_000]
    assert second.append(ATTEMPT, HOST, len(content), b"end\n") == len(content) + 4
    followed, at = [], 0
    while batch := second.lines(ATTEMPT, HOST, at, complete=True).lines:
        followed += [line for line, _ in batch]
        at = batch[-1][1]
    assert followed == [line.decode().rstrip() for line in [*lines, b"end"]]


def test_all_but_the_last_part_of_an_idle_log_moves(store, archive, clock):
    first, second = (SharedLogs(store, archive, clock) for _ in range(2))
    for number in range(5):
        first.append(ATTEMPT, HOST, number * 2, f"{number}\n".encode())
    clock.advance(IDLE_AFTER)
    assert first.compact() == 1
    assert first.compact() == 0
    assert len(store.objects("logs/")) == 1
    assert whole(second) == b"0\n1\n2\n3\n4\n"


def test_servers_that_move_the_same_parts_do_no_harm(store, archive, clock):
    first, second = (SharedLogs(store, archive, clock) for _ in range(2))
    for number in range(50):
        (first, second)[number % 2].append(ATTEMPT, HOST, number * 3, f"{number:02d}\n".encode())
    before = whole(first)
    clock.advance(IDLE_AFTER)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda logs: logs.compact(), (first, second)))
    assert whole(first) == whole(second) == before == b"".join(b"%02d\n" % n for n in range(50))


def test_the_limit_of_a_job_counts_what_all_servers_stored(store, archive, clock):
    first, second = (SharedLogs(store, archive, clock, limit=1000) for _ in range(2))
    first.append(ATTEMPT, HOST, 0, b"x" * 900)
    other = HostId("slice-a/1")
    assert second.append(ATTEMPT, other, 0, b"y" * 500) == 500, "acknowledged, not stored"
    stored = second.read(ATTEMPT, other, 0, 10_000)
    assert stored.startswith(b"y" * 100 + b"\n[tpufleet] the logs of this job have reached 1000")
    assert first.append(ATTEMPT, other, 500, b"z" * 10) == 510
    assert first.read(ATTEMPT, other, 0, 10_000) == stored


def test_at_the_limit_the_oldest_parts_leave_the_bucket(store, archive, clock):
    first, second = (SharedLogs(store, archive, clock, limit=4 * 2**20) for _ in range(2))
    lines = [f"{number:07d} {'x' * 500}\n".encode() for number in range(20_000)]
    content, offset = b"".join(lines), 0
    for start in range(0, len(content), 200_000):
        part = content[start : start + 200_000]
        offset = (first, second)[start // 200_000 % 2].append(ATTEMPT, HOST, offset, part)
        clock.advance(MIN_AGE)
        first.compact()
    stored = sum(map(len, archive.objects.values())) + sum(
        each.size for each in store.objects("logs/")
    )
    assert 2 * 2**20 < stored <= 4 * 2**20
    newest = [line.decode().strip() for line in lines[-3_000:]]
    for logs in (first, second, SharedLogs(store, archive, clock)):
        read = whole(logs).decode().splitlines()
        assert read[0] == lines[0].decode().strip() and read[-3_000:] == newest
        assert sum("bytes of output were deleted here" in line for line in read) == 1
        assert logs.tail_offset(ATTEMPT, HOST, 10) == len(content) - sum(map(len, lines[-10:]))
        assert logs.tail_offset(ATTEMPT, HOST, 19_999) > len(content) // 2


def test_a_log_at_the_limit_is_the_same_in_the_bucket_and_on_another_disk(archive, tmp_path):
    logs, lines, offset = ArchivedLogs(tmp_path / "one", archive, 10_000), [], 0
    for number in range(1_500):
        lines.append(f"line {number:06d}\n")
        offset = logs.append(ATTEMPT, HOST, offset, lines[-1].encode())
        if number % 50 == 0:
            logs.upload_changes()
    logs.upload_changes()
    assert sum(map(len, archive.objects.values())) <= 10_000
    other = ArchivedLogs(tmp_path / "two", archive, 10_000)
    assert whole(other) == whole(logs)
    assert whole(other).decode().endswith("".join(lines[-500:]))
    assert other.append(ATTEMPT, HOST, offset, b"more\n") == offset + 5


def test_purging_deletes_both_parts_of_a_log(store, archive, clock, tmp_path):
    logs = SharedLogs(store, archive, clock)
    for number in range(3):
        logs.append(ATTEMPT, HOST, number, b"x")
    logs.append(AttemptId("job2.0"), HOST, 0, b"kept")
    clock.advance(IDLE_AFTER)
    logs.compact()
    files = JobFiles(
        state=tmp_path, snapshots=SnapshotFiles(tmp_path), archive=archive, store=store
    )
    assert files.size(JobId("job")) == 3
    files.delete(JobId("job"), ("logs", "results"))
    assert archive.objects == {}
    assert [each.name.split("/")[1] for each in store.objects("logs/")] == ["job2"]


def test_the_first_result_is_kept_and_every_server_has_it(archive, tmp_path):
    first, second = (ResultFiles(tmp_path / name, archive) for name in ("one", "two"))
    assert first.put(JobId("job"), b"result")
    assert not second.put(JobId("job"), b"other")
    assert second.require(JobId("job")).read_bytes() == b"result"
    first.delete(JobId("job"))
    with pytest.raises(NotFound, match="has no result"):
        second.require(JobId("job"))


def test_secrets_are_shared_and_encrypted(store, clock):
    store.put_user(ADA)
    first, second = (JobSecrets(store, [derived_key(b"server secret")], clock) for _ in range(2))
    first.put("TOKEN", "hunter2 ünïcode", "ada")
    first.put("TOKEN", "everyone's")
    assert second.get("TOKEN", "ada") == "hunter2 ünïcode"
    assert second.get("TOKEN", "bob") == "everyone's"
    assert (second.names("ada"), second.names(), second.names("bob")) == (
        ("TOKEN",),
        ("TOKEN",),
        (),
    )
    names = [each.name for each in store.objects("secrets/")]
    assert len(names) == 2
    assert not [data for data in store.read_objects(names).values() if b"hunter" in data]
    second.put("TOKEN", "changed", "ada")
    assert first.get("TOKEN", "ada") == "changed"
    second.delete("TOKEN")
    with pytest.raises(NotFound, match="no shared secret named"):
        first.delete("TOKEN")
    first.delete_all("ada")
    assert second.get("TOKEN", "ada") is None


def test_two_servers_do_not_exceed_the_limit_of_secrets_together(store, clock, monkeypatch):
    """The other server stores one after this one has sealed its own."""
    monkeypatch.setattr(secrets_module, "MAX_SECRETS", 3)
    store.put_user(ADA)
    first, second = (JobSecrets(store, [derived_key(b"server secret")], clock) for _ in range(2))
    first.put("ONE", "value-one", "ada")
    first.put("TWO", "value-two", "ada")
    seal = first._sealed.seal

    def seal_slowly(name: str, value: str) -> bytes:
        second.put("THREE", "value-three", "ada")
        return seal(name, value)

    monkeypatch.setattr(first._sealed, "seal", seal_slowly)
    with pytest.raises(Conflict, match=r"3 secrets, the limit\n.*tpu secret delete"):
        first.put("FOUR", "value-four", "ada")
    assert first.names("ada") == ("ONE", "THREE", "TWO")
    first.put("TWO", "value-changed", "ada")
    assert second.get("TWO", "ada") == "value-changed"


def test_a_secret_that_was_copied_to_another_name_cannot_be_read(store, clock, caplog):
    store.put_user(ADA)
    secrets = JobSecrets(store, [derived_key(b"server secret")], clock)
    secrets.put("MINE", "hunter2", "ada")
    [stored] = store.read_objects(["secrets/own/ada/MINE"]).values()
    store.put_object("secrets/own/bob/MINE", stored, clock.now())
    assert secrets.get("MINE", "bob") is None
    assert (
        JobSecrets(store, [derived_key(b"another server secret")], clock).get("MINE", "ada") is None
    )
    assert "cannot decrypt secrets/own/bob/MINE" in caplog.text
