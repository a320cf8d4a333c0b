"""A place in Google Cloud Storage, `gs://bucket/prefix`, through the official client.

An object is there whole or not at all, so what is uploaded last is what makes the rest count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tpufleet.errors import BadInput, NotFound, PermissionMissing, ProviderUnavailable

SCHEME = "gs://"
DEADLINE = 60.0


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing tells of an object."""

    size: int
    crc32c: str  # of its content, in base64


class Bucket:
    """Objects below one prefix, by names relative to it."""

    def __init__(self, url: str, connect: Callable[[], Any] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "gs" or not parts.netloc:
            raise BadInput(f"{url!r} is no place in Cloud Storage; write gs://bucket/folder")
        self.url = url.rstrip("/")
        self._prefix = f"{parts.path.strip('/')}/" if parts.path.strip("/") else ""
        self._name = parts.netloc
        self._connect = connect or connect
        self._opened: Any = None

    def child(self, name: str) -> Bucket:
        return Bucket(f"{self.url}/{name}", self._connect)

    def list_objects(self, prefix: str = "") -> dict[str, ObjectInfo]:
        """Every object that begins so."""
        with translate_errors(self.url):
            found = self._bucket.list_blobs(prefix=self._prefix + prefix, timeout=DEADLINE)
            return {
                blob.name.removeprefix(self._prefix): ObjectInfo(blob.size, blob.crc32c)
                for blob in found
            }

    def exists(self, name: str) -> bool:
        with translate_errors(self.url):
            return bool(self._blob(name).exists(timeout=DEADLINE))

    def read(self, name: str) -> bytes:
        with translate_errors(f"{self.url}/{name}"):
            return self._blob(name).download_as_bytes(timeout=DEADLINE)

    def write(self, name: str, data: bytes) -> None:
        with translate_errors(f"{self.url}/{name}"):
            self._blob(name).upload_from_string(
                data, content_type="application/octet-stream", timeout=DEADLINE
            )

    def create(self, name: str, path: Path) -> bool:
        """Upload a file, unless there is such an object already."""
        from google.api_core import exceptions

        with translate_errors(f"{self.url}/{name}"):
            try:
                # Generation 0 means: only if it does not exist.
                self._blob(name).upload_from_filename(
                    str(path), if_generation_match=0, checksum="crc32c", timeout=DEADLINE
                )
            except exceptions.PreconditionFailed:
                return False
            return True

    def upload(self, name: str, path: Path) -> ObjectInfo:
        with translate_errors(f"{self.url}/{name}"):
            blob = self._blob(name)
            blob.upload_from_filename(str(path), checksum="crc32c", timeout=DEADLINE)
            return ObjectInfo(blob.size, blob.crc32c)

    def download(self, name: str, path: Path) -> None:
        """Whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with translate_errors(f"{self.url}/{name}"):
                self._blob(name).download_to_filename(
                    str(draft), checksum="crc32c", timeout=DEADLINE
                )
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    def delete(self, names: list[str]) -> None:
        """Those that are there."""
        with translate_errors(self.url):
            self._bucket.delete_blobs(
                [self._prefix + name for name in names],
                on_error=lambda blob: None,
                timeout=DEADLINE,
            )

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._prefix + name)

    @property
    def _bucket(self) -> Any:
        if self._opened is None:
            self._opened = self._connect().bucket(self._name)
        return self._opened


def connect() -> Any:
    """The official client; without credentials when it is pointed at an emulator."""
    try:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage
    except ImportError as error:
        raise BadInput(
            f"gs:// needs Google's client ({error.name} is missing); "
            "run `pip install 'tpufleet[gcs]'`"
        ) from error
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return storage.Client(credentials=AnonymousCredentials(), project="emulated")
    return storage.Client()


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Google's errors as ours."""
    from google.api_core import exceptions
    from google.auth import exceptions as auth

    try:
        yield
    except exceptions.NotFound as error:
        raise NotFound(f"{what} does not exist") from error
    except (exceptions.Forbidden, exceptions.Unauthorized, auth.GoogleAuthError) as error:
        raise PermissionMissing(
            f"{what}: {error}; grant roles/storage.objectUser on the bucket to this identity"
        ) from error
    except exceptions.GoogleAPIError as error:
        raise ProviderUnavailable(f"{what}: {error}") from error
