"""The streams that watches read from, by the thread that reads: told when they begin, kept from
dying unnoticed, and ended from outside."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

# A watch is silent while nothing happens, so the kernel asks whether the other side is still there:
# after this much silence, this often, and so many times. Seconds.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2}


class WatchStreams:
    def __init__(self) -> None:
        self._reading: dict[int, Any] = {}
        self._began: dict[int, Callable[[], None]] = {}

    @contextmanager
    def report_connected(self, on_connected: Callable[[], None]) -> Iterator[None]:
        """For the watches of this thread: whom to tell that the server took one up."""
        thread = threading.get_ident()
        self._began[thread] = on_connected
        try:
            yield
        finally:
            self._began.pop(thread, None)
            self._reading.pop(thread, None)

    def track(self, response: Any) -> None:
        """For every answer of the server, from the thread that asked."""
        if "watch" not in response.request.url.params:
            return
        thread, stream = threading.get_ident(), response.extensions.get("network_stream")
        self._reading[thread] = stream
        if response.is_success and thread in self._began:
            _keep_alive(_socket_of(stream))
            self._began[thread]()

    def interrupt(self, thread: threading.Thread) -> None:
        """End the watch that this thread waits for, if it waits for one."""
        open_socket = _socket_of(self._reading.get(thread.ident or 0))
        if open_socket is None:
            return
        try:
            socket.socket.shutdown(open_socket, socket.SHUT_RDWR)
        except OSError:
            return  # it is closed already


def _socket_of(stream: Any) -> Any:
    return stream.get_extra_info("socket") if stream is not None else None


def _keep_alive(open_socket: Any) -> None:
    if open_socket is None:
        return
    with suppress(OSError):  # broken already, as who reads from it will find
        open_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # not every system lets them be chosen
                open_socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
