"""The storage at an address: a folder, `gs://bucket/prefix` or `s3://bucket/prefix`."""

from __future__ import annotations

from pathlib import Path

from tpufleet.errors import BadInput, install_command
from tpufleet.runtime.bucket_urls import split_bucket_url
from tpufleet_activations.io.storage import LocalFolder, Storage


def open_storage(url: str | Path) -> Storage:
    """The storage at a path, `gs://bucket/prefix` or `s3://bucket/prefix`."""
    scheme, bucket, name = split_bucket_url(str(url))
    if scheme in ("gs", "s3") and not bucket:
        raise _unsupported(url, "no bucket name")
    try:
        if scheme == "gs":
            from tpufleet_activations.io.gcs import GcsBucket

            return GcsBucket(bucket, name)
        if scheme == "s3":
            from tpufleet_activations.io.s3 import S3Bucket

            return S3Bucket(bucket, name)
    except ImportError as error:
        extra = {"gs": "gcs"}.get(scheme, scheme)
        raise BadInput(
            f"{scheme}:// needs {error.name}\n  next: {install_command(f'tpufleet[{extra}]')}"
        ) from error
    if scheme not in ("", "file"):
        raise _unsupported(url, f"unknown scheme {scheme}")
    folder = LocalFolder(f"/{name.lstrip('/')}" if scheme else url)
    if folder.path.is_file():
        raise _unsupported(url, "a file")
    return folder


def _unsupported(url: object, reason: str) -> BadInput:
    return BadInput(
        f"unsupported storage {url}: {reason}; expected a folder, gs://bucket/… or s3://bucket/…"
    )
