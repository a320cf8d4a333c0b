"""The key that encrypts secrets of jobs, wrapped by a key management service: what is on disk, in
the database and in backups cannot be decrypted without that service."""

from __future__ import annotations

import base64
import os
from typing import Any, Protocol

from tpufleet.config import Config
from tpufleet.errors import BadInput, Unreachable, install_command
from tpufleet.stores.base import Store

_WRAPPED_KEY = "wrapped secrets key"  # in the store's metadata
_KEY_BYTES = 32
_TIMEOUT_SECONDS = 20.0


class KeyService(Protocol):
    """A key that never leaves its service."""

    name: str

    def encrypt(self, plaintext: bytes) -> bytes: ...
    def decrypt(self, ciphertext: bytes) -> bytes: ...


def secrets_key(settings: Config, store: Store) -> bytes | None:
    """None: no key service is configured."""
    if settings.secrets_kms_key is None:
        return None
    return unwrapped_key(store, CloudKms(settings.secrets_kms_key))


def unwrapped_key(store: Store, service: KeyService) -> bytes:
    """Created and wrapped on first use. The name of the wrapping key is stored beside it."""
    stored = store.metadata(_WRAPPED_KEY)
    if stored is None:
        wrapped = base64.b64encode(service.encrypt(os.urandom(_KEY_BYTES))).decode()
        store.put_metadata(_WRAPPED_KEY, f"{service.name} {wrapped}")
        stored = store.metadata(_WRAPPED_KEY)  # of another server, if that was faster
    assert stored is not None
    name, _, wrapped = stored.partition(" ")
    if name != service.name:
        raise BadInput(
            f"secrets_kms_key: secrets are encrypted with {name}, not with {service.name}; "
            "a key is replaced by a new version of it in Cloud KMS"
        )
    return service.decrypt(base64.b64decode(wrapped))


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
            raise Unreachable(f"Cloud KMS cannot be reached for {self.name}: {error}") from error
        if response.status_code != 200:
            raise Unreachable(
                f"Cloud KMS refused to {verb} with {self.name}: {response.status_code} "
                f"{response.text[:300]}\n  next: grant the server's service account "
                "roles/cloudkms.cryptoKeyEncrypterDecrypter on the key"
            )
        return base64.b64decode(response.json()[result])


def _authorized_session() -> Any:
    try:
        import google.auth
        from google.auth.transport.requests import AuthorizedSession
    except ImportError as error:
        raise BadInput(
            f"secrets_kms_key requires the package {error.name}\n"
            f"  next: {install_command('tpufleet[gcs]')}"
        ) from error
    credentials, _ = google.auth.default(["https://www.googleapis.com/auth/cloudkms"])
    return AuthorizedSession(credentials)
