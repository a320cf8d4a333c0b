"""Objects below a Google Cloud Storage prefix, `gs://bucket/prefix`, through the official client.

An object becomes visible as a whole, so the object uploaded last can commit the others.
"""

from __future__ import annotations

import base64
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from tpufleet.errors import invalid, optional_packages
from tpufleet.runtime.bucket_urls import split_bucket_url
from tpufleet.runtime.gcs_errors import (
    is_credentials_outage,
    is_damaged_upload,
    translate_errors,
)

SCHEME = "gs://"
TIMEOUT_SECONDS = 60.0
UPLOAD_SESSIONS = 3
RETRY_SECONDS = 120.0  # the client's own deadline
REQUEST_TRIES = 3  # of one request, after that deadline
SLOWEST_UPLINK = 128 << 10  # bytes per second of one connection
LARGEST_REQUEST = 100 << 20  # the client divides larger uploads


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Metadata of an object in a listing."""

    size: int
    crc32c: str  # of its content, in base64


def crc32c(data: bytes) -> str:
    """As in a listing."""
    import google_crc32c

    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()


class Bucket:
    """Objects below one prefix, by names relative to it."""

    def __init__(self, url: str) -> None:
        scheme, bucket, folder = split_bucket_url(url)
        if scheme != "gs" or not bucket:
            raise invalid(url, "a Cloud Storage location", "gs://bucket/folder")
        self.url = url.rstrip("/")
        self._prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
        self._name = bucket
        self._opened: Any = None

    def names(self, prefix: str = "") -> dict[str, ObjectInfo]:
        """Every object whose name starts with the prefix."""
        with translate_errors(self.url):
            blobs = self._bucket.list_blobs(prefix=self._prefix + prefix, timeout=TIMEOUT_SECONDS)
            return {
                blob.name.removeprefix(self._prefix): ObjectInfo(blob.size, blob.crc32c)
                for blob in blobs
            }

    def entries(self, folder: str = "") -> list[str]:
        """Names in one folder, relative to it; those of folders end with a slash."""
        with translate_errors(self.url):
            prefix = self._prefix + folder
            listing = self._bucket.list_blobs(prefix=prefix, delimiter="/", timeout=TIMEOUT_SECONDS)
            names = [blob.name.removeprefix(prefix) for blob in listing]
            folders = [name.removeprefix(prefix) for name in listing.prefixes]
        return [name for name in (*names, *folders) if name]

    def has(self, name: str) -> bool:
        with translate_errors(self.url):
            return bool(self._blob(name).exists(timeout=TIMEOUT_SECONDS))

    def read(self, name: str) -> bytes:
        with translate_errors(f"{self.url}/{name}"):
            return self._blob(name).download_as_bytes(timeout=TIMEOUT_SECONDS)

    def write(self, name: str, data: bytes) -> None:
        with translate_errors(f"{self.url}/{name}"):
            self._blob(name).upload_from_string(
                data,
                content_type="application/octet-stream",
                **upload_options(len(data)),
            )

    def create(self, name: str, path: Path) -> bool:
        """Upload a file; False when the object already exists."""
        from google.api_core import exceptions

        with translate_errors(f"{self.url}/{name}"):
            try:
                # Generation 0: only if it does not exist.
                self._send(self._blob(name), path, if_generation_match=0)
            except exceptions.PreconditionFailed:
                return False
            return True

    def upload(self, name: str, path: Path) -> ObjectInfo:
        with translate_errors(f"{self.url}/{name}"):
            blob = self._blob(name)
            self._send(blob, path)
            return ObjectInfo(blob.size, blob.crc32c)

    def download(self, name: str, path: Path) -> None:
        """Download to a temporary file, then rename."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with translate_errors(f"{self.url}/{name}"):
                self._blob(name).download_to_filename(
                    str(draft), checksum="crc32c", timeout=TIMEOUT_SECONDS
                )
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    def delete(self, names: list[str]) -> None:
        """Objects that do not exist are ignored."""
        with translate_errors(self.url):
            self._bucket.delete_blobs(
                [self._prefix + name for name in names],
                on_error=lambda blob: None,
                timeout=TIMEOUT_SECONDS,
            )

    def _send(self, blob: Any, path: Path, **options: Any) -> None:
        options |= upload_options(path.stat().st_size)
        in_new_sessions(lambda: blob.upload_from_filename(str(path), checksum="crc32c", **options))

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._prefix + name)

    @property
    def _bucket(self) -> Any:
        if self._opened is None:
            self._opened = connect().bucket(self._name)
        return self._opened


def in_new_sessions(upload: Callable[[], None]) -> None:
    """Google ends an upload session that it has lost with 404 or 410, and asks for a new one
    (cloud.google.com/storage/docs/performing-resumable-uploads#handling_errors). What was damaged
    on the way is sent again, too."""
    for attempt in range(UPLOAD_SESSIONS):
        try:
            return upload()
        except Exception as error:
            repeatable = _is_lost_session(error) or is_damaged_upload(error)
            if not repeatable or attempt == UPLOAD_SESSIONS - 1:
                raise


def _is_lost_session(error: Exception) -> bool:
    from google.api_core import exceptions

    return isinstance(error, exceptions.GoogleAPICallError) and error.code in (
        HTTPStatus.NOT_FOUND,
        HTTPStatus.GONE,
    )


def upload_options(size: int) -> dict[str, Any]:
    """For writes of which each has one writer, so that repeating them is safe: how often, and for
    how long."""
    # While a request is sent, the connection has the first timeout, for all of its bytes.
    sending = TIMEOUT_SECONDS + min(size, LARGEST_REQUEST) / SLOWEST_UPLINK
    return {"retry": _upload_retry(), "timeout": (sending, TIMEOUT_SECONDS)}


def _upload_retry() -> Any:
    """The client counts its deadline from the start of a request, so that one that takes longer is
    never repeated. Here each request has a few tries, however long they take."""
    from google.api_core.retry import Retry
    from google.cloud.storage.retry import DEFAULT_RETRY

    class UploadRetry(Retry):
        def __call__(self, func: Any, on_error: Any = None) -> Any:
            started, tries = time.monotonic(), itertools.count(1)

            def repeats(error: Exception) -> bool:
                early = time.monotonic() - started < RETRY_SECONDS
                temporary = DEFAULT_RETRY._predicate(error) or is_credentials_outage(error)
                return (next(tries) < REQUEST_TRIES or early) and temporary

            return DEFAULT_RETRY.with_predicate(repeats).with_timeout(None)(func, on_error)

    return UploadRetry()


def connect() -> Any:
    """The official client; without credentials when STORAGE_EMULATOR_HOST is set."""
    with optional_packages("gs://", "gcs"):
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage  # type: ignore[attr-defined]  # a namespace package
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return storage.Client(credentials=AnonymousCredentials(), project="emulated")
    return storage.Client(project=None)  # objects are accessed without one
