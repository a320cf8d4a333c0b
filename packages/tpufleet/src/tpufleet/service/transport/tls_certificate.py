"""The certificate of the server, which is read again when it was renewed."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

CHECK_SECONDS = 10.0


class RenewedCertificate:
    """Programs such as certbot replace the files; connections made after that use the new ones."""

    def __init__(
        self, cert: Path, key: Path | None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._cert, self._key = cert, key
        self._monotonic = monotonic
        self._version = self._read_version()
        self._context = self._load()
        self._checked_at = monotonic()

    def context(self) -> ssl.SSLContext:
        now = self._monotonic()
        if now - self._checked_at >= CHECK_SECONDS:
            self._checked_at = now
            self._renew()
        return self._context

    def _renew(self) -> None:
        try:
            version = self._read_version()
            if version == self._version:
                return
            self._context = self._load()
        except (OSError, ssl.SSLError) as error:
            # Half of a renewal: the key does not match yet. The next connection tries again.
            log.warning("cannot read the renewed certificate %s: %s", self._cert, error)
            return
        self._version = version
        log.info("read the renewed certificate %s", self._cert)

    def _read_version(self) -> tuple[tuple[int, int, int], ...]:
        """Changes with the files, also where they are links."""
        stats = [path.stat() for path in (self._cert, self._key) if path is not None]
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._cert, self._key)
        return context
