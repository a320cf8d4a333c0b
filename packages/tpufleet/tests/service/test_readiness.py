"""`/readyz` and `/metrics` while the server cannot record what it would accept."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from tests.chaos.small_disk import SmallDisk
from tests.service.harness import ServiceHarness
from tests.service.test_metrics import scrape, value
from tpufleet.errors import DatabaseFull, StorageFull, StorageReadOnly, StorageUnusable, Unreachable
from tpufleet.stores.memory import MemoryStore

SECOND = timedelta(seconds=1)


class FailingWrites(MemoryStore):
    """Reads work."""

    error: Unreachable | None = None

    def write_error(self) -> Unreachable | None:
        return self.error

    def commit(self, change, *, fence=None) -> None:
        if self.error is not None:
            raise self.error
        super().commit(change, fence=fence)

    def record_heartbeats(self, liveness) -> None:
        if self.error is not None:
            raise self.error
        super().record_heartbeats(liveness)


@pytest.fixture
def store() -> FailingWrites:
    return FailingWrites()


@pytest.fixture
def failing(store: FailingWrites, tmp_path) -> Iterator[ServiceHarness]:
    service = ServiceHarness(store, tmp_path / "state")
    service.start()
    yield service
    store.error = None
    service.close()


def readiness(service: ServiceHarness) -> tuple[int, str]:
    service.clock.advance(3 * SECOND)
    with service.http() as http:
        answer = http.get(service.url + "/readyz")
    return answer.status_code, answer.text


def writable(service: ServiceHarness) -> float | None:
    return value(scrape(service), "tpufleet_writable")


@pytest.mark.parametrize(
    ("error", "reason", "next_step"),
    [
        (StorageFull("database /srv/a.db"), "disk is full", "free space on"),
        (DatabaseFull("/srv/a.db"), "disk of the server's database is full", "free space on the"),
        (StorageReadOnly("database /srv/a.db"), "database is read-only", "make its file"),
        (StorageUnusable("database /srv/a.db"), "cannot write its database", "an admin finds"),
        (Unreachable("database /srv/a.db"), "cannot write its database", "an admin finds"),
    ],
    ids=["full", "Postgres full", "read-only", "damaged", "input/output error"],
)
def test_a_server_that_cannot_write_answers_heartbeats_and_says_what_to_do(
    failing, store, error, reason, next_step
):
    failing.submit("job-1")
    failing.add_slice("s1", "job-1")
    failing.add_attempt("job-1", 0, "s1")
    failing.send_heartbeat("s1/0")
    assert readiness(failing) == (200, "ok\n")
    store.error = error
    status, text = readiness(failing)
    assert status == 200 and reason in text and f"next: {next_step}" in text
    assert writable(failing) == 0
    assert "/srv" not in text  # anyone may ask
    failing.send_heartbeat("s1/0")
    with failing.http() as http:
        assert http.get(failing.url + "/healthz").status_code == 200
    store.error = None
    assert readiness(failing) == (200, "ok\n")
    assert writable(failing) == 1


def test_a_submission_to_a_read_only_database_says_so(failing, store):
    store.error = StorageReadOnly("database /srv/a.db is read-only")
    with pytest.raises(Unreachable, match=r"(?s)read-only.*next: make its file"):
        failing.submit("job-1")


def test_a_full_state_folder_is_told_although_the_database_has_room(tmp_path):
    disk = SmallDisk(tmp_path / "disk")
    if not disk.mounted:
        pytest.skip("only root can mount a disk")
    service = ServiceHarness(MemoryStore(), disk.folder)
    service.start()
    try:
        assert readiness(service) == (200, "ok\n")
        disk.fill([])
        status, text = readiness(service)
        assert status == 200 and "disk is full" in text and "next: free space on" in text
        disk.free([])
        assert readiness(service) == (200, "ok\n")
    finally:
        service.close()
        disk.cleanup()
