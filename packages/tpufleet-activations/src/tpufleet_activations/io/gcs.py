"""Datasets in Google Cloud Storage, through the official client."""

from __future__ import annotations

import base64
import contextlib
from typing import Any

from google.api_core import exceptions
from google.cloud import storage  # type: ignore[attr-defined]  # a namespace package
from google.cloud.storage.retry import DEFAULT_RETRY

from tpufleet.errors import missing
from tpufleet.runtime.gcs import connect, in_new_sessions, upload_options
from tpufleet.runtime.gcs_errors import compressed, translate_errors
from tpufleet_activations.io.storage import BucketStorage


class GcsBucket(BucketStorage):
    """Objects below `gs://bucket/prefix`."""

    def __init__(self, bucket: str, prefix: str, client: storage.Client | None = None):
        super().__init__("gs", bucket, prefix)
        with translate_errors(self.url):
            self._client = client or connect()
        self._bucket = self._client.bucket(bucket)

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

    def _send(self, content: Any, size: int, name: str) -> None:
        def send() -> None:
            content.seek(0)
            options = upload_options(size)
            self._blob(name).upload_from_file(content, size=size, checksum="crc32c", **options)

        with self._translate_errors(name):
            in_new_sessions(send)

    def size(self, name: str) -> int:
        return self._existing(name).size

    def version(self, name: str) -> str:
        return str(self._existing(name).generation)

    def checksum(self, name: str) -> str:
        crc32c = self._existing(name).crc32c
        return f"crc32c:{base64.b64decode(crc32c).hex()}" if crc32c else ""

    def _existing(self, name: str) -> Any:
        with self._translate_errors(name):
            blob = self._bucket.get_blob(self._prefix + name)
        if blob is None:
            raise missing(f"{self.url}/{name}")
        return blob

    def read_range(self, name: str, start: int, size: int) -> bytes:
        with self._translate_errors(name):
            data: bytes = self._blob(name).download_as_bytes(start=start, end=start + size - 1)
        if len(data) > size:  # the client has decompressed it
            raise compressed(f"{self.url}/{name}")
        return data

    def delete(self, name: str) -> None:
        with self._translate_errors(name), contextlib.suppress(exceptions.NotFound):
            self._blob(name).delete(retry=DEFAULT_RETRY)  # only one worker writes a shard name

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._prefix + name)

    def _translate_errors(self, name: str) -> Any:
        return translate_errors(f"{self.url}/{name}")
