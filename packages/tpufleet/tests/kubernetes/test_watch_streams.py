"""The streams of open watches, on real sockets."""

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


def response(ours: socket.socket, *, ok: bool = True, **params: str) -> Any:
    stream = SimpleNamespace(get_extra_info=lambda name: ours if name == "socket" else None)
    request = SimpleNamespace(url=SimpleNamespace(params=params))
    return SimpleNamespace(request=request, is_success=ok, extensions={"network_stream": stream})


def kept_alive(ours: socket.socket) -> bool:
    return ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0


def test_an_accepted_watch_is_reported_and_gets_tcp_keepalive(connected):
    ours, _ = connected
    streams, connections = WatchStreams(), []
    with streams.report_connected(lambda: connections.append("now")):
        streams.track(response(ours, watch="true"))
    assert connections == ["now"] and kept_alive(ours)


@pytest.mark.parametrize(
    ("ok", "params"), [(False, {"watch": "true"}), (True, {})], ids=["refused", "no watch"]
)
def test_other_responses_are_not_reported(connected, ok, params):
    ours, _ = connected
    streams, connections = WatchStreams(), []
    with streams.report_connected(lambda: connections.append("now")):
        streams.track(response(ours, ok=ok, **params))
    assert connections == [] and not kept_alive(ours)


def test_a_reading_thread_is_interrupted(connected):
    ours, _ = connected
    streams, reads = WatchStreams(), threading.Event()

    def follow():
        with streams.report_connected(reads.set):
            streams.track(response(ours, watch="true"))
            while ours.recv(100):
                pass

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    assert reads.wait(900)
    streams.interrupt(thread)
    wait_until(lambda: not thread.is_alive(), 30, lambda: "still reading")
    streams.interrupt(thread)  # no longer reading: no error
