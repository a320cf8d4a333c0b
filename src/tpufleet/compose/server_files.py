"""What a server has on its machine: a state folder to itself, a secret, a place to listen."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from tpufleet.config import Config
from tpufleet.errors import BadInput, Conflict
from tpufleet.stores.base import Store


def server_secret(path: Path, store: Store) -> bytes:
    """What slice tokens follow from. Servers that share a store share this file, and with it the
    folder that it is in."""
    if not path.exists():
        write_private(path, secrets.token_hex(32) + "\n")
    secret = path.read_text().strip().encode()
    fingerprint = hashlib.sha256(b"fingerprint:" + secret).hexdigest()[:16]
    known = store.metadata("secret fingerprint")
    if known is None:
        store.put_metadata("secret fingerprint", fingerprint)
    elif known != fingerprint:
        raise Conflict(
            f"{path} is not the secret of the servers that use this store; they share one folder "
            "for it, for code, logs, checkpoints and slices: set TPUFLEET_DATA to it"
        )
    return secret


@contextlib.contextmanager
def exclusive_lock(home: Path) -> Iterator[None]:
    """One server in one state folder."""
    with open(home / "serve.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(
                f"a control plane already runs in {home}; `tpu serve --stop` ends it"
            ) from error
        yield


def lease_holder(settings: Config) -> str:
    """Who holds the controller's lease. One server alone uses the store in its state folder, so
    the next one there is the same holder and need not wait for the lease of one that died."""
    if settings.store is None:
        return "the server of this folder"
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


def listen_on_previous_port(address: str, memory: Path) -> socket.socket:
    """Where any port will do, the one of last time: agents that outlived the server call there."""
    host, _, port = address.rpartition(":")
    if int(port) != 0:
        return _listen(address)
    try:
        listener = _listen(f"{host}:{int(memory.read_text())}")
    except (FileNotFoundError, ValueError, BadInput):
        listener = _listen(address)
    write_private(memory, f"{listener.getsockname()[1]}\n")
    return listener


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, for asyncio turns off Nagle's delay (40 ms a call) only then.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), int(port)))
    except OSError as error:
        raise BadInput(f"listen: cannot use {address}: {error.strerror}") from error
    listener.listen(2048)
    return listener


def advertised_host(host: str) -> str:
    """An address that agents can call when the server listens everywhere."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user-{os.getuid()}"


def write_private(path: Path, text: str) -> None:
    """Readable by its owner alone from the first byte on; never half written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.replace(draft, path)
