"""The streams that watches read from, on sockets of the test's own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.server_process import wait_until
from tpufleet.kubernetes.watch_streams import WatchStreams


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    with ours, theirs:
        yield ours, theirs


def answer(ours: socket.socket, *, ok: bool = True, **params: str) -> Any:
    stream = SimpleNamespace(get_extra_info=lambda name: ours if name == "socket" else None)
    request = SimpleNamespace(url=SimpleNamespace(params=params))
    return SimpleNamespace(request=request, is_success=ok, extensions={"network_stream": stream})


def kept_alive(ours: socket.socket) -> bool:
    return ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0


def test_a_watch_that_the_server_took_up_is_told_and_its_network_is_looked_after(connected):
    ours, _ = connected
    streams, began = WatchStreams(), []
    with streams.report_connected(lambda: began.append("now")):
        streams.track(answer(ours, watch="true"))
    assert began == ["now"] and kept_alive(ours)


@pytest.mark.parametrize(
    ("ok", "params"), [(False, {"watch": "true"}), (True, {})], ids=["refused", "no watch"]
)
def test_other_answers_are_nothing_to_tell(connected, ok, params):
    ours, _ = connected
    streams, began = WatchStreams(), []
    with streams.report_connected(lambda: began.append("now")):
        streams.track(answer(ours, ok=ok, **params))
    assert began == [] and not kept_alive(ours)


def test_a_thread_that_waits_for_news_is_interrupted_from_outside(connected):
    ours, _ = connected
    streams, reads = WatchStreams(), threading.Event()

    def follow():
        with streams.report_connected(reads.set):
            streams.track(answer(ours, watch="true"))
            while ours.recv(100):
                pass

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    assert reads.wait(30)
    streams.interrupt(thread)
    wait_until(lambda: not thread.is_alive(), 30, lambda: "it still reads")
    streams.interrupt(thread)  # which reads nothing any more
