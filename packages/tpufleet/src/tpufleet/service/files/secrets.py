"""Secrets: encrypted (AES-256-GCM), one file each, readable by the server's user only; in the store
when several servers share it. Never in a log.

A user's own secrets are only given to their jobs; shared secrets to all jobs.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import logging
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpufleet.clocks import Clock
from tpufleet.errors import BadInput, Conflict, NotFound
from tpufleet.service.operations import redaction
from tpufleet.service.transport import identifiers
from tpufleet.stores.base import Store

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_OWN = ".own"  # one folder per user; not a valid secret name
_NONCE_BYTES = 12
_SEALED_PREFIX = "tpufleet-sealed-1:"
MAX_SECRET_BYTES = 64 * 1024  # it becomes an environment variable
MAX_SECRETS = 200  # of one user, or shared


logger = logging.getLogger(__name__)


def derived_key(server_secret: bytes) -> bytes:
    """For servers without a key of their own for secrets."""
    return hmac.digest(server_secret, b"secrets of jobs", "sha256")


class SealedValues:
    """Encrypts with the first key. What an earlier key encrypted can still be read. The name is
    authenticated too, so a secret cannot be passed off as another."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._ciphers = [_cipher(key) for key in dict.fromkeys(keys)]

    def seal(self, name: str, value: str) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._ciphers[0].encrypt(nonce, value.encode(), name.encode())

    def open(self, name: str, sealed: bytes) -> str | None:
        """None, with an error in the log, when no key fits."""
        value, _ = self.open_with_age(name, sealed)
        return value

    def open_with_age(self, name: str, sealed: bytes) -> tuple[str | None, bool]:
        """The value, and whether the newest key encrypted it."""
        from cryptography.exceptions import InvalidTag

        nonce, content = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        for number, cipher in enumerate(self._ciphers):
            try:
                return cipher.decrypt(nonce, content, name.encode()).decode(), number == 0
            except (InvalidTag, ValueError):
                continue
        logger.error("cannot decrypt %s; set it again with `tpu secret set`", name)
        return None, False


class SecretFiles:
    def __init__(self, folder: Path, keys: Sequence[bytes]) -> None:
        self._folder = folder
        self._sealed = SealedValues(keys)
        self._lock = threading.Lock()

    def encrypt_all(self) -> int:
        """Encrypt again what an earlier key encrypted. Returns how many."""
        count = 0
        for owner in (None, *self.owners()):
            for name in self.names(owner):
                value, current = self._open(name, owner)
                if value is not None and not current:
                    self._write(name, value, owner)
                    count += 1
        return count

    def owners(self) -> list[str]:
        """Users with secrets of their own."""
        return sorted(path.name for path in (self._folder / _OWN).glob("*") if path.is_dir())

    def names(self, owner: str | None = None) -> tuple[str, ...]:
        """Of a user; None: the shared ones."""
        folder = self._folder_of(owner)
        if not folder.is_dir():
            return ()
        return tuple(sorted(entry.name for entry in folder.iterdir() if _is_secret(entry)))

    def get(self, name: str, owner: str) -> str | None:
        """The value for a job of this user: their own secret, else the shared one."""
        identifiers.check_secret_name(name)
        for holder in (owner, None):
            value = self._read(name, holder)
            if value is not None:
                redaction.remember(holder, _log_source(name), value)
                return value
        return None

    def put(self, name: str, value: str, owner: str | None = None) -> None:
        identifiers.check_secret_name(name)
        if "\0" in value or len(value.encode()) > MAX_SECRET_BYTES:
            raise BadInput(
                f"value: must be text of at most {MAX_SECRET_BYTES} bytes, without null characters"
            )
        if value.startswith("file:"):
            # Agents would read it as the path of a file on their host.
            raise BadInput(
                "value: must not start with `file:`; put the file reference in the job file instead"
            )
        if not self._write_within_limit(name, value, owner):
            count = len(self.names(owner))
            raise Conflict(
                f"there are {count} secrets, the limit\n"
                "  next: `tpu secret list`, then `tpu secret delete NAME`"
            )
        redaction.remember(owner, _log_source(name), value)

    def delete(self, name: str, owner: str | None = None) -> None:
        if not self._remove(identifiers.check_secret_name(name), owner):
            kind = "shared secret" if owner is None else "secret"
            near = identifiers.suggestion(name, self.names(owner))
            raise NotFound(f"no {kind} named {name!r}{near}")
        redaction.forget(owner, _log_source(name))

    def delete_all(self, owner: str) -> None:
        """So that a later user of the same name does not get them."""
        # Renamed first: one that is written meanwhile fails, or is deleted too.
        deleted = self._folder / f".deleted-{secrets.token_hex(8)}"
        with contextlib.suppress(FileNotFoundError):
            self._folder_of(owner).rename(deleted)
            shutil.rmtree(deleted)
        redaction.forget_all(owner)

    def _read(self, name: str, owner: str | None) -> str | None:
        return self._open(name, owner)[0]

    def _open(self, name: str, owner: str | None) -> tuple[str | None, bool]:
        try:
            text = (self._folder_of(owner) / name).read_text()
        except FileNotFoundError:
            return None, False
        sealed = base64.b64decode(text.removeprefix(_SEALED_PREFIX))
        return self._sealed.open_with_age(_object_name(name, owner), sealed)

    def _write_within_limit(self, name: str, value: str, owner: str | None) -> bool:
        with self._lock:
            known = self.names(owner)
            if len(known) >= MAX_SECRETS and name not in known:
                return False
            self._write(name, value, owner)
            return True

    def _write(self, name: str, value: str, owner: str | None) -> None:
        folder = self._folder_of(owner)
        for each in (self._folder, self._folder / _OWN, folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Created with mode 0600 and renamed, so that a reader never sees a partial secret.
        sealed = self._sealed.seal(_object_name(name, owner), value)
        try:
            handle, draft = tempfile.mkstemp(dir=folder, prefix=".draft-")
        except FileNotFoundError as error:  # `delete_all` of its owner
            raise Conflict(f"user {owner} was deleted") from error
        try:
            with os.fdopen(handle, "w") as file:
                file.write(_SEALED_PREFIX + base64.b64encode(sealed).decode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, folder / name)
        except FileNotFoundError as error:
            raise Conflict(f"user {owner} was deleted") from error
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
    """In the store."""

    def __init__(self, store: Store, keys: Sequence[bytes], clock: Clock) -> None:
        super().__init__(Path("unused"), keys)
        self._store = store
        self._clock = clock

    def encrypt_all(self) -> int:
        return 0  # each is encrypted with the newest key when it is set again

    def import_files(self, files: SecretFiles) -> int:
        """Take over secrets that this server kept on its disk; return how many. Those that the
        store has are kept, and those of deleted users are left."""
        count = 0
        owners = [name for name in files.owners() if self._store.user(name) is not None]
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
        redaction.forget_all(owner)

    def _read(self, name: str, owner: str | None) -> str | None:
        key = _object_name(name, owner)
        sealed = self._store.read_objects([key]).get(key)
        return None if sealed is None else self._sealed.open(key, sealed)

    def _write_within_limit(self, name: str, value: str, owner: str | None) -> bool:
        return self._put_object(name, value, owner, MAX_SECRETS)

    def _write(self, name: str, value: str, owner: str | None) -> None:
        self._put_object(name, value, owner, None)

    def _put_object(self, name: str, value: str, owner: str | None, limit: int | None) -> bool:
        key = _object_name(name, owner)
        return self._store.put_object(
            key,
            self._sealed.seal(key, value),
            self._clock.now(),
            replace=True,
            required_user=owner or "",
            limit=None if limit is None else (_object_name("", owner), limit),
        )

    def _remove(self, name: str, owner: str | None) -> bool:
        key = _object_name(name, owner)
        known = bool(self._store.read_objects([key]))
        self._store.delete_objects([key])
        return known


def _object_name(name: str, owner: str | None) -> str:
    if owner is None:
        return f"secrets/shared/{name}"
    return f"secrets/own/{identifiers.check_user_name(owner)}/{name}"


def _log_source(name: str) -> str:
    return f"secret/{name}"


def _cipher(key: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _is_secret(entry: Path) -> bool:
    return not entry.name.startswith(".") and entry.is_file()
