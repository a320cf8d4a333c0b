"""Uvicorn around the application: loopback by default, and streams that end when it does."""

from __future__ import annotations

import socket

import uvicorn
from starlette.applications import Starlette

SHUTDOWN_GRACE_SECONDS = 5  # for requests under way when the server ends


class FleetServer(uvicorn.Server):
    """Ends the streams first; otherwise a shutdown would wait for clients that never hang up."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app = self.config.app
        assert isinstance(app, Starlette)
        app.state.hub.close()
        await super().shutdown(sockets)


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A bound socket, so that the port is known before the server runs."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only where the protocol is spelled out; with it on,
    # every answer would wait 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def make_server(app: Starlette) -> FleetServer:
    """Not yet running: `run(sockets=[listen(…)])` blocks, and ends on SIGINT, SIGTERM or
    `should_exit`."""
    return FleetServer(
        uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            lifespan="on",
            server_header=False,
            # Longer than the slowest heartbeat, so that agents keep their connection.
            timeout_keep_alive=75,
            timeout_graceful_shutdown=SHUTDOWN_GRACE_SECONDS,
        )
    )
