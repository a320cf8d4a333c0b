"""A load balancer: one address in front of several servers."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit

from tests.server_process import Server


class LoadBalancer:
    """Every connection goes to the first server that takes it."""

    def __init__(self) -> None:
        self.servers: list[Server] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:  # closed
                return
            server = self._connected()
            if server is None:
                caller.close()
                continue
            for source, target in ((caller, server), (server, caller)):
                threading.Thread(target=_forward, args=(source, target), daemon=True).start()

    def _connected(self) -> socket.socket | None:
        for server in list(self.servers):
            parts = urlsplit(server.url)
            with contextlib.suppress(OSError):
                return socket.create_connection((parts.hostname, parts.port), timeout=2)
        return None


def _forward(source: socket.socket, target: socket.socket) -> None:
    source.settimeout(None)
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass  # one side is gone, so the other is told below
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
