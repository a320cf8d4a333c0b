"""Datasets in Google Cloud Storage, through the official client."""

from __future__ import annotations

import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from google.api_core import exceptions
from google.cloud import storage  # type: ignore[attr-defined]  # a namespace package
from google.cloud.storage.retry import DEFAULT_RETRY

from tpufleet.runtime.gcs import connect, in_new_sessions, upload_options
from tpufleet.runtime.gcs_errors import translate_errors
from tpufleet_activations.input_errors import missing
from tpufleet_activations.io.shard_writer import BufferStream, DraftFile, MemoryFile, UploadStream
from tpufleet_activations.io.staging import StagingFolder

# Of a shard: large enough that requests do not matter, small enough to wait in memory. The client
# sends up to 100 MB in one request.
FILE_BYTES = 64 << 20
# Smaller files are faster in one request; larger ones are uploaded in concurrent parts.
PARALLEL_FROM = 64 << 20
PART = 32 << 20
WORKERS = 8
MAX_PARTS = 32  # limit of one compose request
# Only one worker writes a given shard name, so retrying a write is safe.
RETRY: dict[str, Any] = {"retry": DEFAULT_RETRY}


class FilePart(UploadStream):
    """A range of a file as a stream of its own: the client takes only streams at position 0."""

    def __init__(self, path: Path, start: int, size: int):
        super().__init__(size)
        self._file, self._start = os.open(path, os.O_RDONLY), start

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: self.size - self._at]
        count = os.preadv(self._file, [view], self._start + self._at)
        self._at += count
        return count

    def close(self) -> None:
        if not self.closed:
            os.close(self._file)
        super().close()


def _upload(blob: Any, content: UploadStream) -> None:
    def send() -> None:
        content.seek(0)
        options = upload_options(content.size)
        blob.upload_from_file(content, size=content.size, checksum="crc32c", **options)

    in_new_sessions(send)


class GcsBucket:
    """Objects below `gs://bucket/prefix`."""

    far = True
    file_bytes: int | None = FILE_BYTES

    def __init__(self, bucket: str, prefix: str, client: storage.Client | None = None):
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.url = f"gs://{bucket}/{self._prefix}".rstrip("/")
        with translate_errors(self.url):
            self._client = client or connect()
        self._bucket = self._client.bucket(bucket)
        self._staging = StagingFolder()

    def create(self, name: str, data: bytes) -> bool:
        with self._translate_errors(name):
            try:
                # Generation 0: only if the object does not exist.
                self._blob(name).upload_from_string(
                    data,
                    if_generation_match=0,
                    content_type="application/octet-stream",
                    **upload_options(len(data)),
                )
            except exceptions.PreconditionFailed:
                return False
        return True

    def replace(self, name: str, data: bytes) -> None:
        with self._translate_errors(name):
            self._blob(name).upload_from_string(
                data, content_type="application/octet-stream", **upload_options(len(data))
            )

    def read(self, name: str) -> bytes:
        with self._translate_errors(name):
            return self._blob(name).download_as_bytes()

    def names(self, prefix: str, start: str = "", end: str = "") -> list[str]:
        # A prefix without objects is no error: what may be missing is the bucket.
        with translate_errors(f"the bucket gs://{self._bucket.name}"):
            blobs = self._client.list_blobs(
                self._bucket,
                prefix=self._prefix + prefix,
                start_offset=self._prefix + start if start else None,
                end_offset=self._prefix + end if end else None,
                fields="items(name),nextPageToken",
            )
            return sorted(blob.name.removeprefix(self._prefix) for blob in blobs)

    def new_shard(self, name: str, draft: str) -> DraftFile | MemoryFile:
        return MemoryFile()

    def write_mode(self) -> str:
        return "upload"

    def put(self, content: BufferStream, name: str) -> None:
        with self._translate_errors(name):
            _upload(self._blob(name), content)

    def upload(self, draft: Path, name: str) -> None:
        size = draft.stat().st_size
        with self._translate_errors(name):
            if size < PARALLEL_FROM:
                with FilePart(draft, 0, size) as content:
                    _upload(self._blob(name), content)
            else:
                self._upload_in_parts(draft, name, size)
        draft.unlink()

    def _upload_in_parts(self, draft: Path, name: str, size: int) -> None:
        """Upload parts concurrently and compose them; the object appears once all have arrived."""
        step = max(PART, -(-size // MAX_PARTS))
        upload_id = uuid.uuid4().hex
        parts = [self._blob(f"parts/{upload_id}-{n:03d}") for n in range(-(-size // step))]

        def send(number: int) -> None:
            start = number * step
            with FilePart(draft, start, min(step, size - start)) as part:
                _upload(parts[number], part)

        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(send, range(len(parts))))
            self._blob(name).compose(parts, **RETRY)
            list(pool.map(self._delete, parts))

    def size(self, name: str) -> int:
        return self._existing(name).size

    def version(self, name: str) -> str:
        return str(self._existing(name).generation)

    def _existing(self, name: str) -> Any:
        with self._translate_errors(name):
            blob = self._bucket.get_blob(self._prefix + name)
        if blob is None:
            raise missing(f"{self.url}/{name}")
        return blob

    def read_range(self, name: str, start: int, size: int) -> bytes:
        with self._translate_errors(name):
            return self._blob(name).download_as_bytes(start=start, end=start + size - 1)

    def delete(self, name: str) -> None:
        with self._translate_errors(name):
            self._delete(self._blob(name))

    def local_path(self, name: str) -> Path | None:
        return None

    def staging(self) -> Path:
        return self._staging.path

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._prefix + name)

    def _delete(self, blob: Any) -> None:
        try:
            blob.delete(**RETRY)
        except exceptions.NotFound:
            return

    def _translate_errors(self, name: str) -> Any:
        return translate_errors(f"{self.url}/{name}")
