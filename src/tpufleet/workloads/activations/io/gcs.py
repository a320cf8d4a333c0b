"""Datasets in Google Cloud Storage, through the official client."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from google.api_core import exceptions
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY

from tpufleet.errors import NotFound
from tpufleet.runtime.gcs import connect as connect
from tpufleet.runtime.gcs import translate_errors
from tpufleet.workloads.activations.io import staging as drafts

# Below this one request is quicker; above it parts go side by side.
PARALLEL_FROM = 64 << 20
PART = 32 << 20
WORKERS = 8
MOST_PARTS = 32  # that one compose request takes
# A shard's name is its writer's alone, so that writing it again is harmless.
AGAIN = {"retry": DEFAULT_RETRY}


class GcsBucket:
    """Objects below `gs://bucket/prefix`. An upload is visible whole or not at all."""

    far = True

    def __init__(self, bucket: str, prefix: str, client: storage.Client | None = None):
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.url = f"gs://{bucket}/{self._prefix}".rstrip("/")
        with translate_errors(self.url):
            self._client = client or connect()
        self._bucket = self._client.bucket(bucket)
        self._drafts = drafts.StagingFolder()

    def create(self, name: str, data: bytes) -> bool:
        with self._told(name):
            try:
                # Generation 0 means: only if the object does not exist.
                self._blob(name).upload_from_string(
                    data, if_generation_match=0, content_type="application/octet-stream"
                )
            except exceptions.PreconditionFailed:
                return False
        return True

    def replace(self, name: str, data: bytes) -> None:
        with self._told(name):
            self._blob(name).upload_from_string(
                data, content_type="application/octet-stream", **AGAIN
            )

    def read(self, name: str) -> bytes:
        with self._told(name):
            return self._blob(name).download_as_bytes()

    def names(self, prefix: str) -> list[str]:
        with self._told(prefix):
            found = self._client.list_blobs(self._bucket, prefix=self._prefix + prefix)
            return sorted(blob.name.removeprefix(self._prefix) for blob in found)

    def upload(self, draft: Path, name: str) -> None:
        size = draft.stat().st_size
        with self._told(name):
            if size < PARALLEL_FROM:
                self._blob(name).upload_from_filename(str(draft), checksum="crc32c", **AGAIN)
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
                parts[number].upload_from_file(file, size=length, checksum="crc32c", **AGAIN)

        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(send, range(len(parts))))
            self._blob(name).compose(parts, **AGAIN)
            list(pool.map(self._delete, parts))

    def size(self, name: str) -> int:
        return self._existing(name).size

    def version(self, name: str) -> str:
        return str(self._existing(name).generation)

    def _existing(self, name: str) -> Any:
        with self._told(name):
            blob = self._bucket.get_blob(self._prefix + name)
        if blob is None:
            raise NotFound(f"{self.url}/{name} does not exist")
        return blob

    def read_range(self, name: str, start: int, size: int) -> bytes:
        with self._told(name):
            return self._blob(name).download_as_bytes(start=start, end=start + size - 1)

    def delete(self, name: str) -> None:
        with self._told(name):
            self._delete(self._blob(name))

    def local_path(self, name: str) -> Path | None:
        return None

    def staging(self) -> Path:
        return self._drafts.path

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._prefix + name)

    def _delete(self, blob: Any) -> None:
        try:
            blob.delete(**AGAIN)
        except exceptions.NotFound:
            return

    def _told(self, name: str) -> Any:
        return translate_errors(f"{self.url}/{name}")
