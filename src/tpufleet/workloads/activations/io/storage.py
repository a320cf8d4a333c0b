"""The storage interface of datasets, and local folders; `gcs` and `s3` implement buckets.

Writes are atomic: an object is visible completely or not at all.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from tpufleet.errors import BadInput, FleetError, NotFound, Permanent, Temporary, install_command
from tpufleet.runtime import filesystem
from tpufleet.runtime.object_store import FolderStore, ObjectStore
from tpufleet.workloads.activations.io.shard_writer import BufferStream
from tpufleet.workloads.activations.io.staging import StagingFolder


class Storage(ObjectStore, Protocol):
    """An object store that can also hold large files, all below one root."""

    url: str
    # Shards of about this size are written from memory with `put`; None: through a local draft.
    file_bytes: int | None

    def put(self, content: BufferStream, name: str) -> None:
        """Write an object from memory, complete and verified, or not at all."""

    def upload(self, draft: Path, name: str) -> None:
        """Move a finished local file to `name`; the draft no longer exists afterwards."""

    def size(self, name: str) -> int: ...

    def version(self, name: str) -> str:
        """Changes whenever the object is written."""

    def delete(self, name: str) -> None:
        """Delete the object; no error if it does not exist."""

    def local_path(self, name: str) -> Path | None:
        """A path that can be memory-mapped, or None."""

    def staging(self) -> Path:
        """A local folder for this process's drafts, which is not part of the dataset."""


class DiskFull(FleetError, Temporary):
    """No space, or no quota, is left for the files of a dataset. Free some, and run again."""


class DiskUnusable(FleetError, Permanent):
    """The disk of a dataset cannot be written."""


@contextmanager
def translate_disk_errors(storage: Storage) -> Iterator[None]:
    """Turn a full or unwritable disk into an error that names it and says how to go on."""
    try:
        yield
    except OSError as error:
        staging = _staging(storage)
        resume = f"committed units are kept; continue with `tpu extract run {storage.url}`"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(staging).free
            where = staging.parent if staging.is_relative_to(storage.url) else staging
            hint = "" if where != staging else ", or set TMPDIR to a folder on a larger disk"
            raise DiskFull(
                f"no space left on device at {where} ({free / 2**30:.1f} GiB free); free some"
                f"{hint}. Concurrent units of --shard-gb each need space there; {resume}"
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO):
            raise DiskUnusable(f"cannot read or write: {error}; {resume}") from error
        raise


def _staging(storage: Storage) -> Path:
    try:
        return storage.staging()
    except OSError:  # the disk is too full for an empty folder
        return Path(storage.url if Path(storage.url).exists() else tempfile.gettempdir())


class LocalFolder(FolderStore):
    """A folder on a local or shared file system."""

    file_bytes: int | None = None  # one file per unit, which is written in place

    def __init__(self, path: str | Path):
        super().__init__(Path(path).absolute())
        self.url = str(self.path)
        self._staging = StagingFolder(self.path / ".staging")

    def put(self, content: BufferStream, name: str) -> None:
        self.replace(name, content.read())

    def upload(self, draft: Path, name: str) -> None:
        target = self._target(name)
        try:
            os.rename(draft, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            # The draft is on another file system.
            copy = target.with_name(f".{target.name}.copy")
            shutil.copyfile(draft, copy)
            filesystem.fsync(copy)
            os.rename(copy, target)
            draft.unlink()
        filesystem.fsync(target.parent)

    def size(self, name: str) -> int:
        return self._existing(name).stat().st_size

    def version(self, name: str) -> str:
        return str(self._existing(name).stat().st_mtime_ns)

    def delete(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def local_path(self, name: str) -> Path | None:
        return self._existing(name)

    def staging(self) -> Path:
        return self._staging.path

    def _existing(self, name: str) -> Path:
        path = self.path / name
        if not path.exists():
            raise NotFound(f"{path} does not exist")
        return path


def open_storage(url: str | Path) -> Storage:
    """The storage at a path, `gs://bucket/prefix` or `s3://bucket/prefix`."""
    parts = urlsplit(str(url))
    if parts.scheme in ("gs", "s3") and not parts.netloc:
        raise BadInput(f"{url} has no bucket name; expected {parts.scheme}://bucket/folder")
    try:
        if parts.scheme == "gs":
            from tpufleet.workloads.activations.io.gcs import GcsBucket

            return GcsBucket(parts.netloc, parts.path)
        if parts.scheme == "s3":
            from tpufleet.workloads.activations.io.s3 import S3Bucket

            return S3Bucket(parts.netloc, parts.path)
    except ImportError as error:
        extra = {"gs": "gcs"}.get(parts.scheme, parts.scheme)
        raise BadInput(
            f"{parts.scheme}:// needs {error.name}\n  next: {install_command(f'tpufleet[{extra}]')}"
        ) from error
    if parts.scheme not in ("", "file"):
        raise BadInput(
            f"unsupported storage {url}; expected a folder, gs://bucket/… or s3://bucket/…"
        )
    folder = LocalFolder(parts.path if parts.scheme else url)
    if folder.path.is_file():
        raise BadInput(f"{url} is a file, expected a folder")
    return folder
