"""Snapshots as tar.gz files, each named by the digest of what it holds and checked against it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

from starlette.concurrency import run_in_threadpool

from tpufleet.errors import BadInput, NotFound
from tpufleet.model.snapshots import EXECUTABLE, REGULAR, SnapshotEntry, is_digest, snapshot_digest

DEFAULT_LIMIT = 512 * 1024 * 1024  # of the upload
_INFLATED = 8  # most times larger than the limit when unpacked; beyond, it is a bomb
_MOST_ENTRIES = 200_000


class SnapshotFiles:
    def __init__(self, folder: Path, limit: int = DEFAULT_LIMIT) -> None:
        self._folder = folder
        self.limit = limit

    def path(self, digest: str) -> Path:
        if not is_digest(digest):
            raise BadInput(f"{digest[:80]!r} is not a digest: 64 hexadecimal digits")
        return self._folder / f"{digest}.tar.gz"

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def require(self, digest: str) -> Path:
        path = self.path(digest)
        if not path.is_file():
            raise NotFound(f"no snapshot {digest} here; upload it first, then submit")
        return path

    def size(self, digest: str) -> int:
        """In bytes, on this disk."""
        path = self.path(digest)
        return path.stat().st_size if path.is_file() else 0

    def delete(self, digest: str) -> None:
        """Success when it is not here."""
        self.path(digest).unlink(missing_ok=True)

    async def put(self, digest: str, chunks: AsyncIterator[bytes]) -> None:
        """Take an upload. It exists only once it is whole and is what its name says."""
        path = self.path(digest)
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".upload-") as draft:
            size = 0
            async for chunk in chunks:
                size += len(chunk)
                if size > self.limit:
                    raise BadInput(self.too_large_message())
                await run_in_threadpool(draft.write, chunk)
            await run_in_threadpool(self._accept, draft, path, digest)

    def too_large_message(self) -> str:
        return (
            f"the snapshot is larger than {self.limit // 2**20} MiB; leave data and outputs out "
            "with a .tpuignore or .gitignore file"
        )

    def _accept(self, draft: BinaryIO, path: Path, digest: str) -> None:
        draft.flush()
        os.fsync(draft.fileno())
        draft.seek(0)
        try:
            found = snapshot_digest(_entries(draft, self.limit * _INFLATED))
        except (tarfile.TarError, EOFError, OSError, ValueError) as error:
            raise BadInput(f"the snapshot is not a whole tar.gz: {error}") from error
        if found != digest:
            raise BadInput(f"the snapshot holds {found}, not {digest}; upload it again")
        with contextlib.suppress(FileExistsError):  # somebody else sent the same meanwhile
            os.link(draft.name, path)


def _entries(file: BinaryIO, limit: int) -> Iterator[SnapshotEntry]:
    total = count = 0
    with tarfile.open(fileobj=file, mode="r|gz") as tar:
        for member in tar:
            count, total = count + 1, total + member.size
            if total > limit or count > _MOST_ENTRIES:
                raise BadInput("the snapshot unpacks to more than a snapshot may hold")
            if member.isdir():
                continue
            yield _entry(tar, member)


def _entry(tar: tarfile.TarFile, member: tarfile.TarInfo) -> SnapshotEntry:
    if member.name.startswith("/") or ".." in member.name.split("/"):
        raise BadInput(f"the snapshot holds {member.name!r}, which leads out of its folder")
    if member.issym():
        return SnapshotEntry(path=member.name, target=member.linkname)
    content = tar.extractfile(member) if member.isreg() else None
    if content is None:
        raise BadInput(f"the snapshot holds {member.name!r}, which is no file, folder or link")
    sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    mode = EXECUTABLE if member.mode & 0o100 else REGULAR
    return SnapshotEntry(path=member.name, mode=mode, size=member.size, sha256=sha256)
