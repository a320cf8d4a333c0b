"""The uvicorn server of the application: its settings, and what uvicorn does not do by itself.

A proxy in front does the rest on the internet: docs/server.md.
"""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from tpufleet.web_server import BACKLOG, WebServer

SHUTDOWN_GRACE_SECONDS = 5  # for requests in flight at shutdown
# Longer than agents keep an idle connection, so that they do not send into one that is closing.
KEEP_ALIVE_SECONDS = 75
# File descriptors for the database, logs, uploads and simulated hosts.
RESERVED_DESCRIPTORS = 256


class FleetServer(WebServer):
    """Closes the event streams at shutdown, which would otherwise wait for their clients."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app = self.config.app
        assert isinstance(app, Starlette)
        app.state.hub.close()
        await super().shutdown(sockets)


def make_server(
    app: Starlette,
    *,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    max_connections: int | None = None,
) -> FleetServer:
    """Not started: `run(sockets=[listen(…)])` blocks until SIGINT, SIGTERM or `should_exit`.

    `max_connections`: by default as many as this process may open files, less a reserve. Clients
    beyond that get 503.
    """
    descriptors = _raise_descriptor_limit()
    return FleetServer(
        uvicorn.Config(
            app,
            # httptools, which uvicorn prefers, does not limit headers, and takes trailers for some.
            http="h11",
            ws="none",
            ssl_certfile=tls_cert,
            ssl_keyfile=tls_key,
            limit_concurrency=max_connections or max(64, descriptors - RESERVED_DESCRIPTORS),
            backlog=BACKLOG,
            access_log=False,
            log_config=None,
            lifespan="on",
            server_header=False,
            # A client could claim any address; uvicorn's variable names the proxies to believe.
            proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=SHUTDOWN_GRACE_SECONDS,
        )
    )


def _raise_descriptor_limit() -> int:
    """To the hard limit, which every process may do for itself: agents keep a connection each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 1_048_576
    if soft == resource.RLIM_INFINITY or soft >= hard:
        return hard
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS: the kernel allows fewer than it says
        return soft
    return hard
