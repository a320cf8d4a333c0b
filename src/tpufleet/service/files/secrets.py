"""Secrets: one file each, readable by the server's user only; encrypted in the store when several
servers share it. Never in a log.

A user's own secrets are only given to their jobs; shared secrets to all jobs.
"""

from __future__ import annotations

import hmac
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tpufleet.clocks import Clock
from tpufleet.errors import BadInput, NotFound
from tpufleet.service import identifiers, redaction
from tpufleet.stores.base import Store

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_OWN = ".own"  # one folder per user; not a valid secret name
_NONCE_BYTES = 12
MAX_SECRET_BYTES = 64 * 1024  # it becomes an environment variable


logger = logging.getLogger(__name__)


class SecretFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self, owner: str | None = None) -> tuple[str, ...]:
        """Of a user; None: the shared ones."""
        folder = self._folder_of(owner)
        if not folder.is_dir():
            return ()
        return tuple(sorted(entry.name for entry in folder.iterdir() if _is_secret(entry)))

    def get(self, name: str, owner: str) -> str | None:
        """The value for a job of this user: their own secret, else the shared one."""
        identifiers.check_secret_name(name)
        value = self._read(name, owner)
        if value is None:
            value = self._read(name, None)
        if value is not None:
            redaction.remember(value)
        return value

    def put(self, name: str, value: str, owner: str | None = None) -> None:
        identifiers.check_secret_name(name)
        redaction.remember(value)
        if "\0" in value or len(value.encode()) > MAX_SECRET_BYTES:
            raise BadInput(
                f"value: must be text of at most {MAX_SECRET_BYTES} bytes, without null characters"
            )
        if value.startswith("file:"):
            # Agents would read it as the path of a file on their host.
            raise BadInput(
                "value: must not start with `file:`; put the file reference in the job file instead"
            )
        self._write(name, value, owner)

    def delete(self, name: str, owner: str | None = None) -> None:
        if not self._remove(identifiers.check_secret_name(name), owner):
            kind = "shared secret" if owner is None else "secret"
            near = identifiers.suggestion(name, self.names(owner))
            raise NotFound(f"no {kind} named {name!r}{near}")

    def delete_all(self, owner: str) -> None:
        """So that a later user of the same name does not get them."""
        folder = self._folder_of(owner)
        if folder.is_dir():
            shutil.rmtree(folder)

    def _read(self, name: str, owner: str | None) -> str | None:
        try:
            return (self._folder_of(owner) / name).read_text()
        except FileNotFoundError:
            return None

    def _write(self, name: str, value: str, owner: str | None) -> None:
        folder = self._folder_of(owner)
        for each in (self._folder, self._folder / _OWN, folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Created with mode 0600 and renamed, so that a reader never sees a partial secret.
        handle, draft = tempfile.mkstemp(dir=folder, prefix=".draft-")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(value)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, folder / name)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise

    def _remove(self, name: str, owner: str | None) -> bool:
        """False when there is none."""
        try:
            (self._folder_of(owner) / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _folder_of(self, owner: str | None) -> Path:
        return (
            self._folder
            if owner is None
            else self._folder / _OWN / identifiers.check_user_name(owner)
        )


class SharedSecrets(SecretFiles):
    """In the store, encrypted with a key that is derived from the server secret (AES-256-GCM). The
    name is authenticated too, so a secret cannot be passed off as another."""

    def __init__(self, store: Store, server_secret: bytes, clock: Clock) -> None:
        super().__init__(Path("unused"))
        self._store = store
        self._clock = clock
        key = hmac.digest(server_secret, b"secrets of jobs", "sha256")
        self._cipher = _cipher(key)

    def import_files(self, folder: Path) -> int:
        """Take over secrets that this server kept on its disk; return how many. Those that the
        store has are kept."""
        files = SecretFiles(folder)
        own = folder / _OWN
        owners = sorted(entry.name for entry in own.iterdir()) if own.is_dir() else []
        count = 0
        for owner in (None, *owners):
            known = self.names(owner)
            for name in files.names(owner):
                value = files._read(name, owner)
                if name not in known and value is not None:
                    self._write(name, value, owner)
                    count += 1
        return count

    def names(self, owner: str | None = None) -> tuple[str, ...]:
        prefix = _object_name("", owner)
        return tuple(each.name.removeprefix(prefix) for each in self._store.objects(prefix))

    def delete_all(self, owner: str) -> None:
        prefix = _object_name("", owner)
        self._store.delete_objects([each.name for each in self._store.objects(prefix)])

    def _read(self, name: str, owner: str | None) -> str | None:
        key = _object_name(name, owner)
        from cryptography.exceptions import InvalidTag

        sealed = self._store.read_objects([key]).get(key)
        if sealed is None:
            return None
        nonce, content = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            return self._cipher.decrypt(nonce, content, key.encode()).decode()
        except InvalidTag:
            logger.error("cannot decrypt %s; set it again with `tpu secret set %s`", key, name)
            return None

    def _write(self, name: str, value: str, owner: str | None) -> None:
        key = _object_name(name, owner)
        nonce = os.urandom(_NONCE_BYTES)
        sealed = nonce + self._cipher.encrypt(nonce, value.encode(), key.encode())
        self._store.put_object(key, sealed, self._clock.now(), replace=True)

    def _remove(self, name: str, owner: str | None) -> bool:
        key = _object_name(name, owner)
        known = bool(self._store.read_objects([key]))
        self._store.delete_objects([key])
        return known


def _object_name(name: str, owner: str | None) -> str:
    if owner is None:
        return f"secrets/shared/{name}"
    return f"secrets/own/{identifiers.check_user_name(owner)}/{name}"


def _cipher(key: bytes) -> AESGCM:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise BadInput(
            "secrets that servers share are encrypted, which requires the package cryptography; "
            "run `pip install 'tpufleet[postgres]'`"
        ) from error
    return AESGCM(key)


def _is_secret(entry: Path) -> bool:
    return not entry.name.startswith(".") and entry.is_file()
