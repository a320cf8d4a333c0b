"""HTTP pages for Kubernetes probes and Prometheus: `/healthz`, `/readyz`, `/metrics`. Read-only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from tpufleet.errors import cannot_listen, invalid

if TYPE_CHECKING:
    from tpufleet.kubernetes.watch_cache import WatchCache

ProbePage = Callable[[], tuple[int, str]]


def stale_caches(caches: Iterable[WatchCache], after: timedelta | None = None) -> str | None:
    """Which caches their server has not confirmed for too long; None when all are current.

    `after` replaces each cache's own limit, for a liveness probe that is slower to fail than the
    readiness probe."""
    stale = [cache for cache in caches if (cache.stale if after is None else cache.age >= after)]
    if not stale:
        return None
    ages = ", ".join(f"{cache.kind.plural} {cache.age.total_seconds():.0f} s" for cache in stale)
    return f"stale watch caches, not confirmed by the API server for: {ages}"


class ProbeServer:
    """A few read-only pages on one address: `HOST:PORT`, or `:PORT` for all interfaces."""

    def __init__(self, address: str, pages: Mapping[str, ProbePage]) -> None:
        host, _, port = address.rpartition(":")
        if not port.isdecimal():
            raise invalid(address, "HOST:PORT or :PORT", "127.0.0.1:8080")
        try:
            self._server = ThreadingHTTPServer((host, int(port)), _handler(pages))
        except (OSError, OverflowError) as error:
            raise cannot_listen(address, error) from error
        self._server.daemon_threads = True
        bound, self.port = self._server.server_address[:2]
        self.address = f"{bound!s}:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name=f"probes-{self.port}", daemon=True
        )

    def start(self) -> ProbeServer:
        self._thread.start()
        return self

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(pages: Mapping[str, ProbePage]) -> type[BaseHTTPRequestHandler]:
    class ProbeHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            status, text = page() if page else (404, "not found\n")
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return  # a probe request every few seconds is not worth a log line

    return ProbeHandler
