"""What Kubernetes and Prometheus ask: `/healthz`, `/readyz` and `/metrics`. They change nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

from tpufleet.errors import BadInput

ProbePage = Callable[[], tuple[int, str]]
ServerType = TypeVar("Server", bound=ThreadingHTTPServer)


def listen(
    server_class: Callable[..., ServerType], address: str, handler: type[BaseHTTPRequestHandler]
) -> ServerType:
    """A server on `HOST:PORT`, or `:PORT` for everywhere. BadInput when that cannot be."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise BadInput(f"{address!r} is no address; one looks like :8080 or 127.0.0.1:8080")
    try:
        return server_class((host, int(port)), handler)
    except (OSError, OverflowError) as error:
        raise BadInput(f"cannot listen on {address}: {error}") from error


class ProbeServer:
    """A few read-only pages on one address."""

    def __init__(self, address: str, pages: Mapping[str, ProbePage]) -> None:
        self._server = listen(ThreadingHTTPServer, address, _handler(pages))
        self._server.daemon_threads = True
        host, self.port = self._server.server_address[:2]
        self.address = f"{host}:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name=f"pages-{self.port}", daemon=True
        )

    def start(self) -> ProbeServer:
        self._thread.start()
        return self

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(pages: Mapping[str, ProbePage]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            status, text = page() if page else (404, "there is no such page\n")
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return  # probes come every few seconds

    return Handler
