"""Secrets: encrypted (AES-256-GCM), in the store. Never in a log.

A user's own secrets are only given to their jobs; shared secrets to all jobs.
"""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tpufleet.clocks import Clock
from tpufleet.errors import BadInput, Conflict, not_found, too_long
from tpufleet.model import identifiers
from tpufleet.service.operations import log_redaction
from tpufleet.stores.base import Store

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_PREFIX = "secrets/"  # of their objects in the store
_NONCE_BYTES = 12
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
        self._keys = tuple(dict.fromkeys(keys))

    @cached_property
    def _ciphers(self) -> Sequence[AESGCM]:
        """When first used: most servers have no secrets, and the library takes 7 MB."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return [AESGCM(key) for key in self._keys]

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


class JobSecrets:
    """In the store, so that all servers have them."""

    def __init__(self, store: Store, keys: Sequence[bytes], clock: Clock) -> None:
        self._store = store
        self._sealed = SealedValues(keys)
        self._clock = clock

    def encrypt_again(self) -> int:
        """What another key than the first encrypted, before this server accepts requests. Returns
        how many."""
        count = 0
        for stored in self._store.objects(_PREFIX):
            for name, sealed in self._store.read_objects([stored.name]).items():
                value, current = self._sealed.open_with_age(name, sealed)
                if value is not None and not current:
                    self._put(name, value)
                    count += 1
        return count

    def names(self, owner: str | None = None) -> tuple[str, ...]:
        """Of a user; None: the shared ones."""
        prefix = _object_name("", owner)
        return tuple(each.name.removeprefix(prefix) for each in self._store.objects(prefix))

    def get(self, name: str, owner: str) -> str | None:
        """The value for a job of this user: their own secret, else the shared one."""
        identifiers.check_secret_name(name)
        for holder in (owner, None):
            key = _object_name(name, holder)
            sealed = self._store.read_objects([key]).get(key)
            value = None if sealed is None else self._sealed.open(key, sealed)
            if value is not None:
                log_redaction.remember(holder, _log_source(name), value)
                return value
        return None

    def put(self, name: str, value: str, owner: str | None = None) -> None:
        identifiers.check_secret_name(name)
        if "\0" in value or len(value.encode()) > MAX_SECRET_BYTES:
            raise too_long(MAX_SECRET_BYTES, "bytes", "value")
        if value.startswith("file:"):
            # Agents would read it as the path of a file on their host.
            raise BadInput(
                "value: must not start with `file:`; put the file reference in the job file instead"
            )
        limit = (_object_name("", owner), MAX_SECRETS)
        if not self._put(_object_name(name, owner), value, required_user=owner or "", limit=limit):
            raise Conflict(
                f"there are {MAX_SECRETS} secrets, the limit\n"
                "  next: `tpu secret list`, then `tpu secret delete NAME`"
            )
        log_redaction.remember(owner, _log_source(name), value)

    def _put(self, key: str, value: str, **conditions: Any) -> bool:
        sealed = self._sealed.seal(key, value)
        return self._store.put_object(key, sealed, self._clock.now(), replace=True, **conditions)

    def delete(self, name: str, owner: str | None = None) -> None:
        key = _object_name(identifiers.check_secret_name(name), owner)
        if not self._store.read_objects([key]):
            kind = "shared secret" if owner is None else "secret"
            raise not_found(kind, name, "secret list", self.names(owner))
        self._store.delete_objects([key])
        log_redaction.forget(owner, _log_source(name))

    def delete_all(self, owner: str) -> None:
        """So that a later user of the same name does not get them."""
        prefix = _object_name("", owner)
        self._store.delete_objects([each.name for each in self._store.objects(prefix)])
        log_redaction.forget_all(owner)


def _object_name(name: str, owner: str | None) -> str:
    if owner is None:
        return f"{_PREFIX}shared/{name}"
    return f"{_PREFIX}own/{identifiers.check_user_name(owner)}/{name}"


def _log_source(name: str) -> str:
    return f"secret/{name}"
