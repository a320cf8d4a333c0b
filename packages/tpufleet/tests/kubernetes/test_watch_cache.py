"""The watch cache: when it may be read, when it lists instead, and when it is stale."""

from __future__ import annotations

import http.client
import logging
from collections.abc import Iterator
from datetime import timedelta

import pytest

pytest.importorskip("lightkube", reason="needs the extra `k8s`: pip install 'tpufleet[k8s]'")

from tests.kubernetes.fake_api_server import FakeApiServer, FakeConnection
from tests.server_process import wait_until
from tpufleet.backoff import Backoff
from tpufleet.kubernetes.connections import POD
from tpufleet.kubernetes.probes import ProbeServer, stale_caches
from tpufleet.kubernetes.watch_cache import LONGEST_RETRY, STALE_AFTER, WatchCache

TIMEOUT = 60.0  # seconds; the machine may be busy


class Watched:
    """A cache of a fake server's pods, on a clock that the test moves. It reconnects at once."""

    def __init__(self) -> None:
        self.server = FakeApiServer()
        self.connection = FakeConnection(self.server)
        self.changes = 0
        self.seconds = 0.0
        self.delays: list[float] = []
        backoff = Backoff(first=0.4, longest=LONGEST_RETRY, jitter=self._no_delay)
        self.cache = WatchCache(
            self.connection,  # type: ignore[arg-type]  # a fake
            POD,
            self._on_change,
            backoff=backoff,
            monotonic=lambda: self.seconds,
        )

    def _on_change(self) -> None:
        self.changes += 1

    def _no_delay(self, seconds: float) -> float:
        self.delays.append(seconds)
        return 0.0005

    def start(self) -> None:
        self.cache.start()
        self.wait_watching()
        self.connection.listed.clear()

    def wait_watching(self) -> None:
        wait_until(
            lambda: POD in self.connection.watching, TIMEOUT, lambda: "the watch did not open"
        )

    def break_watch(self) -> None:
        self.connection.break_watches(POD)
        wait_until(lambda: POD not in self.connection.watching, TIMEOUT, lambda: "still watching")

    def put(self, name: str, **labels: str) -> None:
        self.server.put(POD, {"metadata": {"name": name, "namespace": "n", "labels": labels}})

    def names(self) -> list[str]:
        return sorted(item["metadata"]["name"] for item in self.cache.read())

    def wait_cached(self, *names: str) -> None:
        wait_until(lambda: self._cached() == sorted(names), TIMEOUT, lambda: f"{self._cached()}")

    def _cached(self) -> list[str]:
        return sorted(item["metadata"]["name"] for item in self.cache.all())


def get(server: ProbeServer, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.address, timeout=TIMEOUT)
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read().decode()


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.cache.close()
    assert watched.connection.modified() == []


def test_nothing_is_listed_while_the_watch_works(watched):
    watched.put("a")
    watched.start()
    watched.put("b")
    watched.wait_cached("a", "b")
    watched.server.drop(POD, ("n", "a"))
    watched.wait_cached("b")
    assert watched.names() == ["b"]
    assert watched.connection.listed == []


def test_a_read_before_the_first_list_goes_to_the_server(watched, caplog):
    watched.put("a")
    assert watched.names() == ["a"]
    assert watched.connection.listed == [POD] and not caplog.records


def test_own_writes_are_read_even_if_the_watch_lags(watched):
    watched.put("a")
    watched.start()
    watched.connection.pause(POD)
    watched.put("b")
    watched.server.drop(POD, ("n", "a"))
    assert watched.names() == ["a"]
    watched.cache.invalidate()
    assert watched.names() == ["b"]
    assert watched.names() == ["b"] and watched.connection.listed == [POD]


def test_late_events_do_not_restore_deleted_items(watched):
    watched.start()
    watched.connection.pause(POD)
    watched.put("a")
    watched.put("b")
    watched.server.drop(POD, ("n", "a"))
    watched.cache.invalidate()
    assert watched.names() == ["b"]
    for _ in ("a added", "b added", "a deleted"):
        before = watched.changes
        watched.connection.pause(POD, after=1)
        wait_until(lambda before=before: watched.changes > before, TIMEOUT, lambda: watched.changes)
        assert watched.names() == ["b"]
    watched.connection.pause()
    watched.put("c")
    watched.wait_cached("b", "c")


def test_a_list_does_not_undo_events_that_arrived_meanwhile(watched):
    watched.put("a")
    watched.start()

    def add_pod():
        watched.put("b")
        watched.wait_cached("a", "b")

    watched.connection.during_list = add_pod
    watched.cache.invalidate()
    assert watched.names() == ["a", "b"]
    assert watched.names() == ["a", "b"] and watched.connection.listed == [POD]


def test_a_write_during_a_list_is_not_counted_as_listed(watched):
    watched.start()
    watched.connection.pause(POD)

    def write():
        watched.put("a")
        watched.cache.invalidate()

    watched.connection.during_list = write
    watched.cache.invalidate()
    assert watched.names() == []  # this list started before the write
    assert watched.names() == ["a"]


def test_a_broken_watch_is_logged_once_and_replaced_by_lists_until_it_recovers(watched, caplog):
    watched.put("a")
    watched.start()
    watched.break_watch()

    def warnings():
        return [record for record in caplog.records if "listing instead" in record.getMessage()]

    wait_until(lambda: watched.names() == ["a"] and warnings(), TIMEOUT, lambda: "no warning")
    watched.put("b")
    # Right after the list of a reconnect, and until its watch fails, that list is read.
    wait_until(lambda: watched.names() == ["a", "b"], TIMEOUT, lambda: f"{watched.names()}")
    assert [record.levelno for record in warnings()] == [logging.WARNING]
    watched.connection.break_watches()
    watched.wait_watching()
    watched.connection.listed.clear()
    watched.put("c")
    watched.wait_cached("a", "b", "c")
    assert watched.names() == ["a", "b", "c"] and watched.connection.listed == []


def test_a_watch_recovers_after_2000_failed_reconnects(watched):
    watched.put("a")
    watched.start()
    watched.break_watch()
    target = watched.connection.watch_attempts + 2000
    wait_until(
        lambda: watched.connection.watch_attempts >= target,
        TIMEOUT,
        lambda: f"{watched.connection.watch_attempts} of {target} attempts",
    )
    assert max(watched.delays) == LONGEST_RETRY
    watched.connection.break_watches()
    watched.wait_watching()
    watched.put("b")
    watched.wait_cached("a", "b")


def test_a_silent_watch_is_replaced_by_a_list(watched):
    watched.put("a")
    watched.start()
    watched.connection.pause(POD)
    watched.put("b")
    assert watched.names() == ["a"]
    watched.connection.max_silence = 0.0
    assert watched.names() == ["a", "b"]
    assert watched.connection.listed == [POD]


def test_a_cache_is_stale_once_the_server_has_not_confirmed_it_for_too_long(watched):
    watched.start()
    watched.connection.pause(POD)
    assert not watched.cache.stale
    watched.seconds = STALE_AFTER.total_seconds() - 1
    assert not watched.cache.stale
    watched.seconds += 1
    assert watched.cache.stale
    assert watched.cache.age == STALE_AFTER


@pytest.mark.parametrize("confirmation", ["an event", "a list", "a new watch"])
def test_a_stale_cache_is_current_again_after_a_confirmation(watched, confirmation):
    watched.start()
    watched.seconds = STALE_AFTER.total_seconds()
    assert watched.cache.stale
    if confirmation == "an event":
        watched.put("a")
        watched.wait_cached("a")
    elif confirmation == "a list":
        watched.cache.list_from_server()
    else:
        watched.break_watch()
        watched.connection.break_watches()
        watched.wait_watching()
    wait_until(lambda: not watched.cache.stale, TIMEOUT, lambda: f"age {watched.cache.age}")


def test_a_cache_that_never_synced_becomes_stale(watched):
    assert not watched.cache.stale
    watched.seconds = STALE_AFTER.total_seconds()
    assert watched.cache.stale


def test_probes_name_the_stale_caches_and_their_age(watched):
    watched.start()
    assert stale_caches([watched.cache]) is None
    watched.seconds = 150.0
    message = stale_caches([watched.cache])
    assert message is not None and "pods 150 s" in message
    assert stale_caches([watched.cache], after=timedelta(minutes=5)) is None
    watched.seconds = 300.0
    assert stale_caches([watched.cache], after=timedelta(minutes=5)) is not None


def test_a_readiness_probe_fails_while_a_cache_is_stale(watched):
    def ready() -> tuple[int, str]:
        stale = stale_caches([watched.cache])
        return (200, "ok\n") if stale is None else (503, stale)

    watched.start()
    server = ProbeServer("127.0.0.1:0", {"/readyz": ready}).start()
    try:
        assert get(server, "/readyz")[0] == 200
        watched.seconds = STALE_AFTER.total_seconds()
        assert get(server, "/readyz") == (
            503,
            "stale watch caches, not confirmed by the API server for: pods 120 s",
        )
        watched.cache.list_from_server()
        assert get(server, "/readyz")[0] == 200
    finally:
        server.close()


def test_changes_that_only_a_list_shows_are_reported(watched):
    watched.start()
    watched.connection.pause(POD)
    watched.put("a")
    before = watched.changes
    watched.cache.list_from_server()
    assert watched.changes == before + 1
    watched.cache.list_from_server()
    assert watched.changes == before + 1


def test_a_server_restored_from_a_backup_is_believed(watched):
    watched.put("a")
    watched.put("b")
    watched.start()
    watched.break_watch()
    watched.server.version, watched.server.events = 50, []
    watched.server.items[POD].clear()
    watched.put("old")
    watched.connection.break_watches()
    watched.wait_cached("old")
    watched.put("new")
    watched.wait_cached("new", "old")
