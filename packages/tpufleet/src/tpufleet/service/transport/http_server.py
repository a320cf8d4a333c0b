"""The uvicorn server of the application."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.server import ServerState

from tpufleet.service.transport.client_connections import ClientConnection
from tpufleet.service.transport.connection_limits import (
    ConnectionLimits,
    ConnectionTable,
    LimitedConnection,
    TlsConnection,
)
from tpufleet.service.transport.tls_certificate import RenewedCertificate

SHUTDOWN_GRACE_SECONDS = 5  # for requests in flight at shutdown


class FleetServer(uvicorn.Server):
    """Closes the event streams first; otherwise a shutdown would wait for their clients."""

    def __init__(self, config: uvicorn.Config, table: ConnectionTable) -> None:
        super().__init__(config)
        self._table = table

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app = self.config.app
        assert isinstance(app, Starlette)
        app.state.hub.close()
        self._table.close_handshakes()
        await super().shutdown(sockets)


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A bound socket, so that the port is known before the server starts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only when the protocol is explicit. With it, every response
    # would wait 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def make_server(
    app: Starlette,
    limits: ConnectionLimits | None = None,
    *,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> FleetServer:
    """Not started: `run(sockets=[listen(…)])` blocks until SIGINT, SIGTERM or `should_exit`."""
    limits = limits or ConnectionLimits.from_system()
    table = ConnectionTable(limits)
    certificate = None if tls_cert is None else RenewedCertificate(tls_cert, tls_key)

    def connection(server_state: ServerState, **options: Any) -> asyncio.Protocol:
        made = ClientConnection(
            table,
            server_state,
            app.state.heartbeat_endpoint,
            lambda resting: LimitedConnection(
                server_state=server_state, **options, table=table, resting=resting
            ),
        )
        return made if certificate is None else TlsConnection(made, certificate.context(), table)

    return FleetServer(
        uvicorn.Config(
            app,
            # uvicorn only calls it. TLS is ours, so that its handshakes are limited too.
            http=connection,  # type: ignore[arg-type]
            ws="none",
            loop="asyncio",  # with uvloop, which uvicorn prefers if it is there, handshakes hang
            backlog=limits.backlog,
            access_log=False,
            log_config=None,
            lifespan="on",
            server_header=False,
            # A client could claim any address; uvicorn's variable names the proxies to believe.
            proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,
            timeout_keep_alive=75,  # of clients without a valid token
            timeout_graceful_shutdown=SHUTDOWN_GRACE_SECONDS,
        ),
        table,
    )
