"""A live copy of what a server has: what it may be trusted with, and what it asks for instead."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

pytest.importorskip("lightkube", reason="needs the extra `k8s`: pip install 'tpufleet[k8s]'")

from tests.kubernetes.fake_api_server import FakeApiServer, FakeConnection
from tests.server_process import wait_until
from tpufleet.kubernetes.connections import POD
from tpufleet.kubernetes.watch_cache import WatchCache

WITHIN = 60.0  # seconds; the machine may be busy


class Watched:
    """A mirror of a server's pods that follows it."""

    def __init__(self) -> None:
        self.server = FakeApiServer()
        self.line = FakeConnection(self.server)
        self.news = 0
        self.mirror = WatchCache(self.line, POD, self._changed)  # type: ignore[arg-type]

    def _changed(self) -> None:
        self.news += 1

    def start(self) -> None:
        self.mirror.start()
        wait_until(lambda: POD in self.line.watching, WITHIN, lambda: "the watch did not begin")
        self.line.listed.clear()

    def put(self, name: str, **labels: str) -> None:
        self.server.put(POD, {"metadata": {"name": name, "namespace": "n", "labels": labels}})

    def names(self) -> list[str]:
        return sorted(one["metadata"]["name"] for one in self.mirror.read())

    def shows(self, *names: str) -> None:
        wait_until(lambda: self._all() == sorted(names), WITHIN, lambda: f"it shows {self._all()}")

    def _all(self) -> list[str]:
        return sorted(one["metadata"]["name"] for one in self.mirror.all())


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.mirror.close()
    assert watched.line.modified() == []


def test_while_the_watch_works_nothing_is_asked(watched):
    watched.put("a")
    watched.start()
    watched.put("b")
    watched.shows("a", "b")
    watched.server.drop(POD, ("n", "a"))
    watched.shows("b")
    assert watched.names() == ["b"]
    assert watched.line.asked == []


def test_before_the_watch_began_the_server_is_asked(watched, caplog):
    watched.put("a")
    assert watched.names() == ["a"]
    assert watched.line.asked == [POD] and not caplog.records


def test_our_own_write_is_read_though_the_watch_is_behind(watched):
    watched.put("a")
    watched.start()
    watched.line.hold(POD)
    watched.put("b")
    watched.server.drop(POD, ("n", "a"))
    assert watched.names() == ["a"]
    watched.mirror.doubt()
    assert watched.names() == ["b"]
    assert watched.names() == ["b"] and watched.line.asked == [POD]


def test_what_the_watch_brings_late_does_not_bring_back_what_is_gone(watched):
    watched.start()
    watched.line.hold(POD)
    watched.put("a")
    watched.put("b")
    watched.server.drop(POD, ("n", "a"))
    watched.mirror.doubt()
    assert watched.names() == ["b"]
    for _ in ("it came", "the other came", "it went"):
        before = watched.news
        watched.line.hold(POD, but=1)
        wait_until(
            lambda before=before: watched.news > before, WITHIN, lambda: f"{watched.news} news"
        )
        assert watched.names() == ["b"]
    watched.line.hold()
    watched.put("c")
    watched.shows("b", "c")


def test_a_list_does_not_undo_what_came_while_it_was_on_its_way(watched):
    watched.put("a")
    watched.start()

    def meanwhile():
        watched.put("b")
        watched.shows("a", "b")

    watched.line.meanwhile = meanwhile
    watched.mirror.doubt()
    assert watched.names() == ["a", "b"]
    assert watched.names() == ["a", "b"] and watched.line.asked == [POD]


def test_a_write_while_a_list_is_on_its_way_is_not_taken_as_listed(watched):
    watched.start()
    watched.line.hold(POD)

    def meanwhile():
        watched.put("a")
        watched.mirror.doubt()

    watched.line.meanwhile = meanwhile
    watched.mirror.doubt()
    assert watched.names() == []  # that list had begun before
    assert watched.names() == ["a"]


def test_a_broken_watch_is_said_once_and_the_server_is_asked_until_it_works_again(watched, caplog):
    watched.put("a")
    watched.start()
    watched.line.break_watches(POD)
    wait_until(lambda: POD not in watched.line.watching, WITHIN, lambda: "it still watches")

    def said():
        return [record for record in caplog.records if "listing them" in record.getMessage()]

    wait_until(lambda: watched.names() == ["a"] and said(), WITHIN, lambda: "it was not said")
    watched.put("b")
    assert watched.names() == ["a", "b"]
    assert [record.levelno for record in said()] == [logging.WARNING]
    watched.line.break_watches()
    wait_until(lambda: POD in watched.line.watching, WITHIN, lambda: "it never came back")
    watched.line.asked.clear()
    watched.put("c")
    watched.shows("a", "b", "c")
    assert watched.names() == ["a", "b", "c"] and watched.line.asked == []


def test_a_watch_that_is_silent_for_too_long_is_not_believed(watched):
    watched.put("a")
    watched.start()
    watched.line.hold(POD)
    watched.put("b")
    assert watched.names() == ["a"]
    watched.line.longest_silence = 0.0
    assert watched.names() == ["a", "b"]
    assert watched.line.asked == [POD]


def test_what_was_found_by_asking_while_the_watch_is_broken_is_news(watched):
    watched.start()
    watched.line.hold(POD)
    watched.put("a")
    before = watched.news
    watched.mirror.ask()
    assert watched.news == before + 1
    watched.mirror.ask()
    assert watched.news == before + 1


def test_a_server_that_was_set_back_to_a_backup_is_believed(watched):
    watched.put("a")
    watched.put("b")
    watched.start()
    watched.line.break_watches(POD)
    wait_until(lambda: POD not in watched.line.watching, WITHIN, lambda: "it still watches")
    watched.server.version, watched.server.events = 50, []
    watched.server.items[POD].clear()
    watched.put("old")
    watched.line.break_watches()
    watched.shows("old")
    watched.put("new")
    watched.shows("new", "old")
