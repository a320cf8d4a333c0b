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
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tpufleet.errors import Conflict, FleetError, Permanent, Temporary, missing
from tpufleet.runtime import filesystem
from tpufleet.runtime.object_store import FolderStore, ObjectStore
from tpufleet_activations.formatting import extract_command
from tpufleet_activations.io.aligned_memory import MemoryPool
from tpufleet_activations.io.direct_file import DirectFile, takes_direct_writes
from tpufleet_activations.io.shard_writer import BufferStream, DraftFile, MemoryFile, ShardTarget
from tpufleet_activations.io.staging import StagingFolder


class Storage(ObjectStore, Protocol):
    """An object store that can also hold large files, all below one root."""

    url: str
    # The shards of a unit have about this size; None: one for each unit.
    file_bytes: int | None

    def new_shard(self, name: str, draft: str) -> ShardTarget:
        """What to write a shard to, that is stored with `upload` or `put` once it is finished.
        `draft` is a name that no other shard has."""

    def put(self, content: BufferStream, name: str) -> None:
        """Write an object from memory, complete and verified, or not at all."""

    def upload(self, draft: Path, name: str) -> None:
        """Move a finished local file to `name`; the draft no longer exists afterwards."""

    def size(self, name: str) -> int: ...

    def version(self, name: str) -> str:
        """Changes whenever the object is written."""

    def checksum(self, name: str) -> str:
        """Of the object, such as `crc32c:` or `md5:` and hexadecimal digits; `md5/1024:`: of the
        digests of its parts of that size. Empty if unknown."""

    def local_path(self, name: str) -> Path | None:
        """A path that can be memory-mapped, or None."""

    def staging(self) -> Path:
        """A local folder for this process's drafts, which is not part of the dataset."""


READ_TRIES = 3


class ShortRead(FleetError, Temporary):
    """A storage returned fewer bytes than were asked for, each time."""


def read_exactly(storage: Storage, name: str, start: int, size: int) -> bytes:
    """A range of an object that is known to hold it: a server may end a response early."""
    for _ in range(READ_TRIES):
        data = storage.read_range(name, start, size)
        if len(data) == size:
            return data
    raise ShortRead(
        f"{storage.url}/{name}: {len(data):,} of {size:,} bytes from {start:,} on were read, "
        f"{READ_TRIES} times; run the command again"
    )


def check_empty(target: Storage) -> None:
    """Raise if what is exported to a folder would mix with other files."""
    if names := target.names(""):
        raise Conflict(f"{target.url} holds {names[0]}; delete it, or choose an empty folder")


class DiskFull(FleetError, Temporary):
    """No space, or no quota, is left for the files of a dataset. Free some, and run again."""


class DiskUnusable(FleetError, Permanent):
    """The disk of a dataset cannot be written."""


@contextmanager
def translate_disk_errors(storage: Storage, resume: str = "") -> Iterator[None]:
    """Turn a full or unwritable disk into an error that names it and says how to go on: by default
    with another run."""
    try:
        yield
    except OSError as error:
        runs = not resume
        resume = resume or (
            f"committed units are kept; continue with {extract_command('run', storage.url)}"
        )
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            if isinstance(storage, LocalFolder):
                where, hint = storage.path, ""
            else:
                where, hint = _staging(storage), ", or set TMPDIR to a folder on a larger disk"
            free = shutil.disk_usage(_nearest_existing(where)).free
            need = ". Concurrent units of --shard-gb each need space there" if runs else ""
            raise DiskFull(
                f"no space left on device at {where} ({free / 2**30:.1f} GiB free); free some{hint}"
                f"{need}; {resume}"
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO):
            raise DiskUnusable(f"cannot read or write: {error}; {resume}") from error
        raise


def _nearest_existing(path: Path) -> Path:
    """A folder may not exist yet because its disk is full."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _staging(storage: Storage) -> Path:
    try:
        return storage.staging()
    except OSError:  # the disk is too full for an empty folder
        return Path(storage.url if Path(storage.url).exists() else tempfile.gettempdir())


class BucketStorage:
    """What buckets have in common: a shard stays in memory until it is uploaded."""

    far = True
    # Of a shard: large enough that requests do not matter, small enough to wait in memory.
    file_bytes: int | None = 64 << 20

    def __init__(self, scheme: str, bucket: str, prefix: str):
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.url = f"{scheme}://{bucket}/{self._prefix}".rstrip("/")
        self._staging = StagingFolder()

    def new_shard(self, name: str, draft: str) -> ShardTarget:
        return MemoryFile()

    def put(self, content: BufferStream, name: str) -> None:
        self._send(content, content.size, name)

    def upload(self, draft: Path, name: str) -> None:
        with open(draft, "rb") as content:
            self._send(content, draft.stat().st_size, name)
        draft.unlink()

    def _send(self, content: Any, size: int, name: str) -> None:
        """Store what is read from a file, from its beginning."""
        raise NotImplementedError

    def local_path(self, name: str) -> Path | None:
        return None

    def staging(self) -> Path:
        return self._staging.path


class LocalFolder(FolderStore):
    """A folder on a local or shared file system."""

    file_bytes: int | None = None  # one file per unit, which is written in place

    def __init__(self, path: str | Path, *, direct: bool = True):
        """`direct`: shards are written past the page cache, where the file system takes that."""
        super().__init__(Path(path).absolute())
        self.url = str(self.path)
        self._staging = StagingFolder(self.path / ".staging")
        self._try_direct, self._memory = direct, MemoryPool()

    def new_shard(self, name: str, draft: str) -> ShardTarget:
        path = self.staging() / f"{draft}.draft"
        return DirectFile(path, self._memory) if self.direct else DraftFile(path)

    @cached_property
    def direct(self) -> bool:
        return self._try_direct and takes_direct_writes(self.staging())

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

    def checksum(self, name: str) -> str:
        return ""

    def local_path(self, name: str) -> Path | None:
        return self._existing(name)

    def staging(self) -> Path:
        return self._staging.path

    def _existing(self, name: str) -> Path:
        path = self.path / name
        if not path.exists():
            raise missing(path)
        return path
