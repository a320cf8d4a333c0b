"""What servers of uvicorn need besides: a socket before they start, and renewed certificates."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl

import uvicorn

from tpufleet.errors import cannot_listen, invalid

logger = logging.getLogger(__name__)

BACKLOG = 2048
CERTIFICATE_CHECK_SECONDS = 10.0


class WebServer(uvicorn.Server):
    """Reads a certificate again that was renewed."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if isinstance(self.config.ssl, ssl.SSLContext):
            self._renewal = asyncio.create_task(self._renew_certificate(self.config.ssl))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if isinstance(self.config.ssl, ssl.SSLContext):
            self._renewal.cancel()
        await super().shutdown(sockets)

    async def _renew_certificate(self, context: ssl.SSLContext) -> None:
        """Programs such as certbot and cert-manager replace the files; connections made after that
        use the new."""
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


def listen(address: str) -> socket.socket:
    """Bound to `HOST:PORT`, or to `:PORT` on all interfaces: the port is known before the server
    starts."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise invalid(address, "HOST:PORT or :PORT", ":5000")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only when the protocol is explicit. With it, every response
    # would wait 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), int(port)))
        listener.listen(BACKLOG)  # clients may connect before the server starts
    except (OSError, OverflowError) as error:
        listener.close()
        raise cannot_listen(address, error) from error
    return listener
