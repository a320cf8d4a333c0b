"""The uvicorn server of the application: its settings, and what uvicorn does not do by itself.

A proxy in front does the rest on the internet: docs/server.md.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

logger = logging.getLogger(__name__)

SHUTDOWN_GRACE_SECONDS = 5  # for requests in flight at shutdown
# Longer than agents keep an idle connection, so that they do not send into one that is closing.
KEEP_ALIVE_SECONDS = 75
# File descriptors for the database, logs, uploads and simulated hosts.
RESERVED_DESCRIPTORS = 256
BACKLOG = 2048
CERTIFICATE_CHECK_SECONDS = 10.0


class FleetServer(uvicorn.Server):
    """Closes the event streams at shutdown, which would otherwise wait for their clients; and reads
    a certificate again that was renewed."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if isinstance(self.config.ssl, ssl.SSLContext):
            self._renewal = asyncio.create_task(self._renew_certificate(self.config.ssl))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app = self.config.app
        assert isinstance(app, Starlette)
        app.state.hub.close()
        if isinstance(self.config.ssl, ssl.SSLContext):
            self._renewal.cancel()
        await super().shutdown(sockets)

    async def _renew_certificate(self, context: ssl.SSLContext) -> None:
        """Programs such as certbot replace the files; connections made after that use the new."""
        cert, key = self.config.ssl_certfile, self.config.ssl_keyfile
        assert cert is not None
        files = [cert] if key is None else [cert, key]
        loaded = _versions(files)
        while True:
            await asyncio.sleep(CERTIFICATE_CHECK_SECONDS)
            try:
                if (found := _versions(files)) == loaded:
                    continue
                # A key that does not match yet must not replace the one in use.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
                context.load_cert_chain(cert, key)
                loaded = found
                logger.info("read the renewed certificate %s", cert)
            except (OSError, ssl.SSLError) as error:
                logger.warning("cannot read the renewed certificate %s: %s", cert, error)


def _versions(files: list[str | os.PathLike[str]]) -> list[tuple[int, int, int]]:
    """Changes with the files, also where they are links."""
    stats = [os.stat(file) for file in files]
    return [(stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats]


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A bound socket, so that the port is known before the server starts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only when the protocol is explicit. With it, every response
    # would wait 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)  # clients may connect before the server starts
    except OSError:
        listener.close()
        raise
    return listener


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
