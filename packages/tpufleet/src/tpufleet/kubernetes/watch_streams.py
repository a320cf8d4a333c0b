"""The network streams of open watches, by reading thread: detects that they opened, keeps TCP
keepalive on, and lets another thread end them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

# An idle watch is silent, so the kernel probes the peer: after this many idle seconds, at this
# interval in seconds, this many times.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2}


class WatchStreams:
    def __init__(self) -> None:
        self._reading: dict[int, Any] = {}
        self._on_connected: dict[int, Callable[[], None]] = {}

    @contextmanager
    def report_connected(self, on_connected: Callable[[], None]) -> Iterator[None]:
        """Call `on_connected` whenever the server accepts a watch of this thread."""
        thread = threading.get_ident()
        self._on_connected[thread] = on_connected
        try:
            yield
        finally:
            self._on_connected.pop(thread, None)
            self._reading.pop(thread, None)

    def track(self, response: Any) -> None:
        """Called for every response, in the requesting thread."""
        if "watch" not in response.request.url.params:
            return
        thread, stream = threading.get_ident(), response.extensions.get("network_stream")
        self._reading[thread] = stream
        if response.is_success and thread in self._on_connected:
            _keep_alive(_socket_of(stream))
            self._on_connected[thread]()

    def interrupt(self, thread: threading.Thread) -> None:
        """End the watch that this thread is reading, if any."""
        open_socket = _socket_of(self._reading.get(thread.ident or 0))
        if open_socket is None:
            return
        try:
            socket.socket.shutdown(open_socket, socket.SHUT_RDWR)
        except OSError:
            return  # already closed


def _socket_of(stream: Any) -> Any:
    return stream.get_extra_info("socket") if stream is not None else None


def _keep_alive(open_socket: Any) -> None:
    if open_socket is None:
        return
    with suppress(OSError):  # already broken; the reader will notice
        open_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # not on every platform
                open_socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
