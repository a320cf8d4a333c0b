"""Datasets in Google Cloud Storage, through the official client."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from google.api_core import exceptions
from google.cloud import storage

from tpufleet.errors import NotFound, PermissionMissing
from tpufleet.workloads.activations.storage import temporary_staging

# Below this one request is quicker; above it parts go side by side.
PARALLEL_FROM = 64 << 20
PART = 32 << 20
WORKERS = 8
MOST_PARTS = 32  # that one compose request takes


class GoogleBucket:
    """Objects below `gs://bucket/prefix`. An upload is visible whole or not at all."""

    def __init__(self, bucket: str, prefix: str, client: storage.Client | None = None):
        self._client = client or storage.Client()
        self._bucket = self._client.bucket(bucket)
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.url = f"gs://{bucket}/{self._prefix}".rstrip("/")

    def create(self, name: str, data: bytes) -> bool:
        try:
            # Generation 0 means: only if the object does not exist.
            self._blob(name).upload_from_string(
                data, if_generation_match=0, content_type="application/octet-stream"
            )
        except exceptions.PreconditionFailed:
            return False
        except exceptions.Forbidden as error:
            raise self._forbidden(error) from error
        return True

    def replace(self, name: str, data: bytes) -> None:
        self._blob(name).upload_from_string(data, content_type="application/octet-stream")

    def read(self, name: str) -> bytes:
        try:
            return self._blob(name).download_as_bytes()
        except exceptions.NotFound:
            raise NotFound(f"{self.url}/{name} does not exist") from None

    def names(self, prefix: str) -> list[str]:
        found = self._client.list_blobs(self._bucket, prefix=self._prefix + prefix)
        return sorted(blob.name.removeprefix(self._prefix) for blob in found)

    def upload(self, draft: Path, name: str) -> None:
        size = draft.stat().st_size
        if size < PARALLEL_FROM:
            self._blob(name).upload_from_filename(str(draft), checksum="crc32c")
        else:
            self._upload_in_parts(draft, name, size)
        draft.unlink()

    def _upload_in_parts(self, draft: Path, name: str, size: int) -> None:
        """Parts side by side, then joined by the store; the name appears when all are there."""
        step = max(PART, -(-size // MOST_PARTS))
        mark = uuid.uuid4().hex
        parts = [self._blob(f"parts/{mark}-{n:03d}") for n in range(-(-size // step))]

        def send(number: int) -> None:
            with open(draft, "rb") as file:
                file.seek(number * step)
                length = min(step, size - number * step)
                parts[number].upload_from_file(file, size=length, checksum="crc32c")

        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(send, range(len(parts))))
        self._blob(name).compose(parts)
        for part in parts:
            part.delete()

    def size(self, name: str) -> int:
        return self._existing(name).size

    def version(self, name: str) -> str:
        return str(self._existing(name).generation)

    def _existing(self, name: str) -> Any:
        blob = self._bucket.get_blob(self._prefix + name)
        if blob is None:
            raise NotFound(f"{self.url}/{name} does not exist")
        return blob

    def read_range(self, name: str, start: int, size: int) -> bytes:
        try:
            return self._blob(name).download_as_bytes(start=start, end=start + size - 1)
        except exceptions.NotFound:
            raise NotFound(f"{self.url}/{name} does not exist") from None

    def delete(self, name: str) -> None:
        try:
            self._blob(name).delete()
        except exceptions.NotFound:
            return

    def local(self, name: str) -> Path | None:
        return None

    def staging(self) -> Path:
        return temporary_staging()

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._prefix + name)

    def _forbidden(self, error: Exception) -> PermissionMissing:
        return PermissionMissing(
            f"may not write to {self.url}: grant roles/storage.objectUser on the bucket ({error})"
        )
