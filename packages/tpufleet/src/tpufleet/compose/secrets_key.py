"""The key that encrypts secrets of jobs, wrapped by a key management service: what is on disk, in
the database and in backups cannot be decrypted without it."""

from __future__ import annotations

import base64
import os
from typing import Any, Protocol

from tpufleet.config import Config
from tpufleet.errors import BadInput, Unreachable, optional_packages, unreachable
from tpufleet.stores.base import Store

_WRAPPED_KEY = "wrapped secrets key"  # in the store's metadata
_KEY_BYTES = 32
_TIMEOUT_SECONDS = 20.0


class KeyService(Protocol):
    """Wraps the key of secrets with a key that is neither in the store nor in backups."""

    name: str

    def encrypt(self, plaintext: bytes) -> bytes: ...
    def decrypt(self, ciphertext: bytes) -> bytes: ...


def secrets_key(settings: Config, store: Store) -> bytes | None:
    """None: no key service is configured."""
    if settings.secrets_kms_key is not None:
        return unwrapped_key(store, CloudKms(settings.secrets_kms_key))
    if (stored := store.metadata(_WRAPPED_KEY)) is not None:
        raise _wrapped_with(stored, "which is not configured")
    return None


def unwrapped_key(store: Store, service: KeyService) -> bytes:
    """Created on first use. The name of the service is stored beside it."""
    if store.metadata(_WRAPPED_KEY) is None:
        wrapped = base64.b64encode(service.encrypt(os.urandom(_KEY_BYTES))).decode()
        # Unless another server was faster.
        store.put_metadata(_WRAPPED_KEY, f"{service.name} {wrapped}", replace=False)
    stored = store.metadata(_WRAPPED_KEY)
    assert stored is not None
    name, _, wrapped = stored.partition(" ")
    if name != service.name:
        raise _wrapped_with(stored, f"not with {service.name}")
    return service.decrypt(base64.b64decode(wrapped))


def _wrapped_with(stored: str, but: str) -> BadInput:
    return BadInput(
        f"secrets are encrypted with {stored.partition(' ')[0]}, {but}\n"
        "  next: set secrets_kms_key as before; to replace the key, use a new version of it"
    )


class CloudKms:
    """https://cloud.google.com/kms/docs/reference/rest/v1/projects.locations.keyRings.cryptoKeys"""

    def __init__(
        self, name: str, session: Any = None, url: str = "https://cloudkms.googleapis.com"
    ) -> None:
        self.name = name
        self._session = session if session is not None else _authorized_session()
        self._url = f"{url}/v1/{name}"

    def encrypt(self, plaintext: bytes) -> bytes:
        return self._call("encrypt", "plaintext", plaintext, "ciphertext")

    def decrypt(self, ciphertext: bytes) -> bytes:
        return self._call("decrypt", "ciphertext", ciphertext, "plaintext")

    def _call(self, verb: str, field: str, data: bytes, result: str) -> bytes:
        body = {field: base64.b64encode(data).decode()}
        try:
            response = self._session.post(
                f"{self._url}:{verb}", json=body, timeout=_TIMEOUT_SECONDS
            )
        except Exception as error:  # of the HTTP library or the credentials
            raise Unreachable(unreachable(f"Cloud KMS ({self.name})", error)) from error
        if response.status_code != 200:
            raise Unreachable(
                f"Cloud KMS refused to {verb} with {self.name}: {response.status_code} "
                f"{response.text[:300]}\n  next: grant the server's service account "
                "roles/cloudkms.cryptoKeyEncrypterDecrypter on the key"
            )
        return base64.b64decode(response.json()[result])


def _authorized_session() -> Any:
    with optional_packages("secrets_kms_key", "gcs"):
        import google.auth
        from google.auth.transport.requests import AuthorizedSession
    credentials, _ = google.auth.default(["https://www.googleapis.com/auth/cloudkms"])
    return AuthorizedSession(credentials)
