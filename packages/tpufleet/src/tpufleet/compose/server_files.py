"""Files and sockets of a server: its lock, secret, lease name and listening socket."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import logging
import os
import re
import secrets
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from tpufleet.config import Config
from tpufleet.errors import BadInput, Conflict, readable_by_others, unreadable
from tpufleet.stores.base import Store
from tpufleet.web_server import listen

log = logging.getLogger(__name__)

# Only certificates: a file may hold a private key too, which no host may get.
CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----")

MIN_SECRET_LENGTH = 32  # characters


def server_secret(settings: Config, store: Store) -> bytes:
    """The secret that slice tokens are derived from; the same on all servers of a store."""
    path = settings.secret_file or settings.data / "secret"
    if settings.secret_file is not None:
        secret = read_mounted_secret(path, "secret_file").encode()
    else:
        if not path.exists():
            write_private(path, secrets.token_hex(32) + "\n")
        require_private(path)
        secret = path.read_text().strip().encode()
    fingerprint = hashlib.sha256(b"fingerprint:" + secret).hexdigest()[:16]
    if store.metadata("secret fingerprint") is None:
        # Unless another server was faster.
        store.put_metadata("secret fingerprint", fingerprint, replace=False)
    if store.metadata("secret fingerprint") != fingerprint:
        # Simulated slices are in the data folder, so a copy of the secret is not enough for them.
        local = "local" in settings.enabled_providers
        copy = "" if local else ", or TPUFLEET_SECRET_FILE to a copy of theirs"
        raise Conflict(
            f"{path} differs from the secret of the other servers on this store\n"
            "  next: set TPUFLEET_DATA to the folder that they share for the secret, code, logs, "
            f"checkpoints and slices{copy}"
        )
    return secret


def read_mounted_secret(path: Path, setting: str) -> str:
    """The content of a file that an orchestrator provides, such as a Kubernetes Secret: these are
    often readable by the group of the server."""
    value = read_private_file(path, setting).strip()
    if len(value) < MIN_SECRET_LENGTH or not value.isprintable():
        raise BadInput(
            f"{setting}: {path} must contain at least {MIN_SECRET_LENGTH} characters on one line; "
            f"run `openssl rand -hex 32 > {path}`"
        )
    return value


def read_private_file(path: Path, setting: str) -> str:
    """Refuse a file that everyone can read."""
    try:
        if path.stat().st_mode & 0o007:
            raise readable_by_others(path, setting)
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error, setting) from error


def require_private(path: Path) -> None:
    """Refuse a file with secrets that other users can read, such as one from a backup."""
    if path.exists() and path.stat().st_mode & 0o077:
        raise readable_by_others(path)


def make_private(folder: Path) -> None:
    """Keep other users out of a state folder that existed before. Not out of a folder of another
    user, nor out of one that everyone may write to, such as /tmp; volumes of pods are like this."""
    status = folder.stat()
    shared = status.st_uid != os.geteuid() or status.st_mode & stat.S_ISVTX
    if status.st_mode & 0o077 and not shared:
        folder.chmod(0o700)
        log.info("%s could be entered by other users; its mode is 0700 now", folder)


def forbid_writes_of_others() -> None:
    """Whatever the umask of the shell is: who can write to a folder of the server can replace the
    code of jobs in it."""
    os.umask(os.umask(0o077) | 0o022)


@contextlib.contextmanager
def exclusive_lock(home: Path, holder: Path | None = None) -> Iterator[None]:
    """Only one server may run in a state folder. `holder`: the state folder of the server, if it
    was restored from this one and locks it too."""
    with open(home / "serve.lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            running, own = lock_holder(home), (holder or home).resolve()
            copy = f", and would control the same slices as {own}" if running != own else ""
            raise Conflict(
                f"a server is already running in {running}{copy}\n"
                f"  next: TPUFLEET_HOME={running} tpu serve --stop"
            ) from error
        lock.truncate(0)
        with contextlib.suppress(OSError):  # a full disk is no reason not to start
            os.write(lock.fileno(), os.fsencode((holder or home).resolve()))
        yield


def lock_holder(home: Path) -> Path:
    """The state folder of the server that has locked this one."""
    name = os.fsdecode((home / "serve.lock").read_bytes())
    return Path(name) if name else home.resolve()


def lease_holder(settings: Config) -> str:
    """The holder of the controller's lease. Only one server uses the store in its state folder, so
    its successor is the same holder and does not wait for the lease of a crashed server."""
    if settings.store is None:
        return "local-server"
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


def listen_on_previous_port(address: str, port_file: Path) -> socket.socket:
    """With port 0, the port of the last run: agents that outlived the server connect there."""
    host, _, port = address.rpartition(":")
    if int(port) != 0:
        return listen(address)
    try:
        listener = listen(f"{host}:{int(port_file.read_text())}")
    except (FileNotFoundError, ValueError, BadInput):
        listener = listen(address)
    write_private(port_file, f"{listener.getsockname()[1]}\n")
    return listener


def advertised_host(host: str) -> str:
    """A host name that agents can connect to when the server listens on all interfaces."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def local_host(host: str) -> str:
    """Where commands on the same machine connect to."""
    loopback = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host)
    return loopback or advertised_host(host)


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user-{os.getuid()}"


def write_private(path: Path, text: str) -> None:
    """Atomically, and readable by the owner only."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.replace(draft, path)


def ca_certificates(path: Path | None) -> str:
    """The certificates in the file, in PEM, for hosts that cannot read it."""
    if path is None:
        return ""
    certificates = CERTIFICATE.findall(path.read_text())
    if not certificates:
        raise BadInput(f"ca_file: {path} has no certificate in PEM; it must begin with -----BEGIN")
    return "\n".join(certificates) + "\n"
