"""A load balancer: one address in front of several servers. Its network can be cut."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Sequence
from urllib.parse import urlsplit

from tests.server_process import Server


class LoadBalancer:
    """Every connection goes to the first server that takes it; with `rotate`, each begins with
    the next server."""

    def __init__(self, *, rotate: bool = False) -> None:
        self.servers: Sequence[Server] = []
        self._rotate = rotate
        self._number = itertools.count()
        self._cut = threading.Event()
        self._healed = threading.Event()
        self._stranded: list[socket.socket] = []  # what connected while the network was cut
        self.lost = 0  # connections, and pieces of data, that were cut off
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def partition(self) -> None:
        """From now on packets are dropped: nothing arrives, nothing is refused."""
        self._healed.clear()
        self._cut.set()

    def heal(self) -> None:
        self._cut.clear()
        self._healed.set()
        for stranded in self._stranded:
            stranded.close()
        self._stranded.clear()

    def close(self) -> None:
        self._listener.close()
        self.heal()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:  # closed
                return
            if self._cut.is_set():
                self.lost += 1
                self._stranded.append(caller)
                continue
            server = self._connected()
            if server is None:
                caller.close()
                continue
            server.settimeout(None)
            for source, target in ((caller, server), (server, caller)):
                threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _connected(self) -> socket.socket | None:
        servers = list(self.servers)
        start = next(self._number) % len(servers) if self._rotate and servers else 0
        for server in (*servers[start:], *servers[:start]):
            parts = urlsplit(server.url)
            with contextlib.suppress(OSError):
                return socket.create_connection((parts.hostname, parts.port), timeout=2)
        return None

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if self._cut.is_set():
                    self.lost += 1
                    break  # a byte that was lost: the connection cannot go on
                target.sendall(data)
        except OSError:
            pass  # one side is gone, so the other is told below
        if self._cut.is_set():
            self._healed.wait()
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
