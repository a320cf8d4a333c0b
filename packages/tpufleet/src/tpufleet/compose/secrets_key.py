"""The key that encrypts secrets of jobs, wrapped by a key management service or an age identity:
what is on disk, in the database and in backups cannot be decrypted without it."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tpufleet.compose import server_files
from tpufleet.config import Config
from tpufleet.errors import BadInput, Unreachable, optional_packages
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
    if settings.secrets_age_identity is not None and settings.secrets_kms_key is not None:
        raise BadInput("secrets_age_identity and secrets_kms_key are both set; set one of them")
    services: list[KeyService] = []
    if settings.secrets_age_identity is not None:
        services += age_identities(settings.secrets_age_identity)
    if settings.secrets_kms_key is not None:
        services.append(CloudKms(settings.secrets_kms_key))
    if not services and store.metadata(_WRAPPED_KEY) is None:
        return None
    return unwrapped_key(store, services)


def unwrapped_key(store: Store, services: Sequence[KeyService]) -> bytes:
    """Created on first use, and wrapped by the first service. If it is found wrapped by one of the
    others, it is wrapped again. The name of the service is stored beside it."""
    if store.metadata(_WRAPPED_KEY) is None:
        new = _wrapped(os.urandom(_KEY_BYTES), services[0])
        store.put_metadata(_WRAPPED_KEY, new, replace=False)  # unless another server was faster
    stored = store.metadata(_WRAPPED_KEY)
    assert stored is not None
    name, _, wrapped = stored.partition(" ")
    service = next((each for each in services if each.name == name), None)
    if service is None:
        configured = f"not with {services[0].name}" if services else "which is not configured"
        setting = "secrets_age_identity" if name.startswith("age1") else "secrets_kms_key"
        raise BadInput(
            f"secrets are encrypted with {name}, {configured}\n"
            f"  next: set {setting} as before; to replace the key, use a new version of it in "
            "Cloud KMS, or put a new age identity before the former one in its file"
        )
    key = service.decrypt(base64.b64decode(wrapped))
    if service is not services[0]:
        store.put_metadata(_WRAPPED_KEY, _wrapped(key, services[0]))
    return key


def _wrapped(key: bytes, service: KeyService) -> str:
    return f"{service.name} {base64.b64encode(service.encrypt(key)).decode()}"


class AgeIdentity:
    """https://age-encryption.org/v1. Named by its public key, the recipient."""

    def __init__(self, secret_key: str) -> None:
        self._age = _pyrage()
        self._identity = self._age.x25519.Identity.from_str(secret_key)
        self.name = str(self._identity.to_public())

    def encrypt(self, plaintext: bytes) -> bytes:
        return bytes(self._age.encrypt(plaintext, [self._identity.to_public()]))

    def decrypt(self, ciphertext: bytes) -> bytes:
        return bytes(self._age.decrypt(ciphertext, [self._identity]))


def age_identities(path: Path) -> list[AgeIdentity]:
    """Of a file as `age-keygen` writes it, with one or several identities."""
    age = _pyrage()
    setting = "secrets_age_identity"
    lines = server_files.read_private_file(path, setting).splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    try:
        identities = [AgeIdentity(key) for key in keys]
        if not identities:
            raise age.IdentityError("it has no identity")
    except age.IdentityError as error:
        raise BadInput(
            f"{setting}: {path} is not an age identity file: {error}\n"
            f"  next: run `age-keygen -o {path}`"
        ) from error
    return identities


def _pyrage() -> Any:
    with optional_packages("secrets_age_identity", "age"):
        import pyrage
    return pyrage


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
    with optional_packages("secrets_kms_key", "gcs"):
        import google.auth
        from google.auth.transport.requests import AuthorizedSession
    credentials, _ = google.auth.default(["https://www.googleapis.com/auth/cloudkms"])
    return AuthorizedSession(credentials)
