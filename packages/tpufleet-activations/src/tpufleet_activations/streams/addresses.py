"""Addresses of streams, and the credentials with which machines trust each other.

`unix:/path` is a socket that only its owner can open: rows go through shared memory. `tcp://host:
port` needs a folder of credentials: a certificate, which readers trust and no other, and a token.
"""

from __future__ import annotations

import os
import secrets
import socket
import ssl
import stat
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

from tpufleet.errors import (
    BadInput,
    cannot_listen,
    invalid,
    missing,
    must_be,
    optional_packages,
    readable_by_others,
    unreadable,
)

CERTIFICATE, KEY, TOKEN = "cert.pem", "key.pem", "token"
VALID = timedelta(days=3650)
HANDSHAKE_SECONDS = 20.0


@dataclass(frozen=True)
class Address:
    """`path` of a Unix socket, or host and port."""

    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"unix:{self.path}" if self.path else f"tcp://{host}:{self.port}"


def parse(text: str) -> Address:
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest:
        return Address(path=rest)
    try:
        parts = urlsplit(text)
        if parts.scheme == "tcp" and parts.hostname and parts.port is not None:
            return Address(host=parts.hostname, port=parts.port)
    except ValueError:
        parts = None  # such as a port that is too large
    raise invalid(text, "an address", "unix:/path or tcp://host:port")


@dataclass(frozen=True)
class Credentials:
    """A folder with cert.pem, token and, of the extractor, key.pem."""

    folder: Path

    def token(self) -> str:
        path = self._file(TOKEN)
        if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            raise readable_by_others(path)
        token = path.read_text().strip()
        if not token:
            raise must_be("a token", token, str(path))
        return token

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(self._file(CERTIFICATE), self._file(KEY))
        except ssl.SSLError as error:
            raise unreadable(self.folder / CERTIFICATE, error) from error
        return context

    def client_context(self) -> ssl.SSLContext:
        """Trusts that certificate alone, whatever host it is for."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        try:
            context.load_verify_locations(self._file(CERTIFICATE))
        except ssl.SSLError as error:
            raise unreadable(self.folder / CERTIFICATE, error) from error
        return context

    def create_missing(self) -> None:
        """A token and a self-signed certificate, if the folder is not there."""
        if self.folder.exists():
            return
        with optional_packages("certificates", "extract"):
            key, certificate = _self_signed()
        self.folder.mkdir(parents=True, mode=0o700)
        _write(self.folder / KEY, key)
        _write(self.folder / CERTIFICATE, certificate)
        _write(self.folder / TOKEN, secrets.token_urlsafe(32).encode())

    def _file(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            raise missing(path)
        return path


def needed(address: Address, folder: str | None) -> Credentials | None:
    """Those of a TCP address; a Unix socket has none."""
    if address.path:
        return None
    if not folder:
        raise BadInput(f"{address} needs credentials: a folder with {CERTIFICATE} and {TOKEN}")
    return Credentials(Path(folder))


def listen(address: Address) -> socket.socket:
    try:
        if not address.path:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            return socket.create_server((address.host, address.port), family=family)
        path = Path(address.path)
        if path.is_socket() and not _answers(path):
            path.unlink()  # of an extractor that was killed
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address.path)
        path.chmod(0o600)  # nobody can connect before `listen`
        listener.listen()
        return listener
    except OSError as error:
        raise cannot_listen(str(address), error) from error


def connect(address: Address, credentials: Credentials | None) -> socket.socket:
    """Raises OSError if nobody answers."""
    if address.path:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address.path)
        except OSError:
            connection.close()
            raise
        return connection
    assert credentials is not None
    plain = socket.create_connection((address.host, address.port), timeout=HANDSHAKE_SECONDS)
    try:
        return credentials.client_context().wrap_socket(plain)
    except OSError:
        plain.close()
        raise


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _write(path: Path, content: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as opened:
        opened.write(content)


def _self_signed() -> tuple[bytes, bytes]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tpufleet stream")])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(pem, *plain), certificate.public_bytes(pem)
