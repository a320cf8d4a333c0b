"""Where datasets live: one small interface over a folder or an object store.

Local folders are here; `gcs` and `s3` hold the buckets. Every name becomes visible whole or not.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from tpufleet.errors import BadInput, NotFound
from tpufleet.runtime.objects import Folder, Objects


class Storage(Objects, Protocol):
    """Small objects (`Objects`) and large files, by name below one root."""

    url: str

    def upload(self, draft: Path, name: str) -> None:
        """Make a finished local file visible under `name`; the draft is gone afterwards."""

    def size(self, name: str) -> int: ...

    def version(self, name: str) -> str:
        """Another word when the object was written again."""

    def read_range(self, name: str, start: int, size: int) -> bytes: ...

    def delete(self, name: str) -> None:
        """Remove the object; success when it is already gone."""

    def local(self, name: str) -> Path | None:
        """A path that can be memory-mapped, where the storage has one."""

    def staging(self) -> Path:
        """A folder for drafts; what lies there is never part of the dataset."""


class LocalFolder(Folder):
    """A folder on this machine, or on a file system that several machines share."""

    def __init__(self, path: str | Path):
        super().__init__(Path(path).absolute())
        self.url = str(self.path)

    def upload(self, draft: Path, name: str) -> None:
        target = self._target(name)
        try:
            os.rename(draft, target)
        except OSError:  # the draft lies on another file system
            copy = target.with_name(f".{target.name}.copy")
            shutil.copyfile(draft, copy)
            _sync(copy)
            os.rename(copy, target)
            draft.unlink()
        _sync(target.parent)

    def size(self, name: str) -> int:
        return self._existing(name).stat().st_size

    def version(self, name: str) -> str:
        return str(self._existing(name).stat().st_mtime_ns)

    def read_range(self, name: str, start: int, size: int) -> bytes:
        with open(self._existing(name), "rb") as file:
            file.seek(start)
            return file.read(size)

    def delete(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def local(self, name: str) -> Path | None:
        return self._existing(name)

    def staging(self) -> Path:
        folder = self.path / ".staging"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _existing(self, name: str) -> Path:
        path = self.path / name
        if not path.exists():
            raise NotFound(f"{path} does not exist")
        return path


def open_storage(url: str | Path) -> Storage:
    """The storage at a path, `gs://bucket/prefix` or `s3://bucket/prefix`."""
    parts = urlsplit(str(url))
    if parts.scheme == "gs":
        from tpufleet.workloads.activations.gcs import GoogleBucket

        return GoogleBucket(parts.netloc, parts.path)
    if parts.scheme == "s3":
        from tpufleet.workloads.activations.s3 import S3Bucket

        return S3Bucket(parts.netloc, parts.path)
    if parts.scheme not in ("", "file"):
        raise BadInput(f"cannot store at {url}: use a folder, gs://bucket/… or s3://bucket/…")
    return LocalFolder(parts.path if parts.scheme else url)


def temporary_staging() -> Path:
    """A staging folder for storages that have no disk of their own."""
    folder = Path(tempfile.gettempdir()) / f"tpufleet-staging-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
