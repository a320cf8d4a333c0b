"""Snapshots: tar.gz files of code, named by the digest of their content and verified against it."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import tarfile
import tempfile
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, cast

from starlette.concurrency import run_in_threadpool

from tpufleet.errors import BadInput, NotFound
from tpufleet.model.snapshots import EXECUTABLE, REGULAR, SnapshotEntry, is_digest, snapshot_digest

DEFAULT_LIMIT = 512 * 1024 * 1024  # of the upload
_MAX_INFLATION = 8  # unpacked size as a multiple of the limit; more is a decompression bomb
_MAX_ENTRIES = 200_000
# A path or link target is at most 4 KiB; `tarfile` reads 10 KiB ahead.
_MAX_HEADER_BYTES = 64 * 1024


class SnapshotFiles:
    def __init__(self, folder: Path, limit: int = DEFAULT_LIMIT) -> None:
        self._folder = folder
        self.limit = limit

    def path(self, digest: str) -> Path:
        if not is_digest(digest):
            raise BadInput(f"invalid digest {digest[:80]!r}: expected 64 hexadecimal digits")
        return self._folder / f"{digest}.tar.gz"

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def touch(self, digest: str) -> bool:
        """Whether it exists. If so, it is kept as if it was uploaded now."""
        with contextlib.suppress(FileNotFoundError):  # in the archive only, or not at all
            os.utime(self.path(digest))
        return self.has(digest)

    def require(self, digest: str) -> Path:
        path = self.path(digest)
        if not path.is_file():
            raise NotFound(f"no snapshot {digest}; upload it first")
        return path

    def size(self, digest: str) -> int:
        """Size on this disk in bytes."""
        path = self.path(digest)
        return path.stat().st_size if path.is_file() else 0

    def delete(self, digest: str) -> None:
        """Idempotent."""
        self.path(digest).unlink(missing_ok=True)

    async def put(self, digest: str, chunks: AsyncIterator[bytes]) -> None:
        """Store an upload. It exists only once it is complete and matches its digest."""
        self.path(digest)  # rejects an invalid digest
        await self._store(chunks, digest)

    async def add(self, chunks: AsyncIterator[bytes]) -> str:
        """Store an upload whose sender does not compute digests. Returns the digest."""
        return await self._store(chunks, None)

    async def _store(self, chunks: AsyncIterator[bytes], expected: str | None) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".upload-") as draft:
            size = 0
            async for chunk in chunks:
                size += len(chunk)
                if size > self.limit:
                    raise BadInput(self.too_large_message())
                await run_in_threadpool(draft.write, chunk)
            return await run_in_threadpool(self._accept, draft.file, Path(draft.name), expected)

    def too_large_message(self) -> str:
        return (
            f"the snapshot is larger than {self.limit // 2**20} MiB; exclude data and outputs with "
            "a .tpuignore or .gitignore file"
        )

    def _accept(self, draft: IO[bytes], name: Path, expected: str | None) -> str:
        draft.flush()
        os.fsync(draft.fileno())
        draft.seek(0)
        try:
            actual = snapshot_digest(_entries(draft, self.limit * _MAX_INFLATION))
        except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError) as error:
            raise BadInput(f"the snapshot is not a valid tar.gz: {error}") from error
        if expected not in (None, actual):
            raise BadInput(f"the snapshot has digest {actual}, not {expected}; upload it again")
        path = self.path(actual)
        with contextlib.suppress(FileExistsError):  # uploaded before, or twice at the same time
            os.link(name, path)
        os.utime(path)
        return actual


class _TarStream:
    """Decompresses an upload, at most as much as its headers and files may take. `tarfile` itself
    reads a header of any size into memory, and follows headers that describe headers."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self._unzipped = gzip.GzipFile(fileobj=file, mode="rb")
        self._left = _MAX_HEADER_BYTES  # until the next entry
        self._total_left = limit

    def read(self, size: int = -1) -> bytes:
        most = min(self._left, self._total_left) + 1
        data = self._unzipped.read(most if size < 0 else min(size, most))
        self._left -= len(data)
        self._total_left -= len(data)
        if self._total_left < 0:
            raise BadInput("the snapshot is too large when unpacked")
        if self._left < 0:
            raise BadInput(
                f"the snapshot has an entry with more than {_MAX_HEADER_BYTES} bytes of headers"
            )
        return data

    def allow_content(self, size: int) -> None:
        """The content of an entry, and the headers of the next one."""
        self._left = size + _MAX_HEADER_BYTES


def _entries(file: IO[bytes], limit: int) -> Iterator[SnapshotEntry]:
    total = count = 0
    stream = _TarStream(file, limit + _MAX_ENTRIES * tarfile.BLOCKSIZE * 4)
    # `tarfile` only calls `read`.
    with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|") as tar:
        while (member := tar.next()) is not None:
            # It keeps all of them, with their headers. Not in typeshed.
            tar.members.clear()  # type: ignore[attr-defined]
            count, total = count + 1, total + member.size
            if total > limit or count > _MAX_ENTRIES:
                raise BadInput("the snapshot is too large when unpacked")
            stream.allow_content(member.size)
            if member.isdir():
                continue
            yield _entry(tar, member)


def _entry(tar: tarfile.TarFile, member: tarfile.TarInfo) -> SnapshotEntry:
    if member.name.startswith("/") or ".." in member.name.split("/"):
        raise BadInput(f"the snapshot contains {member.name!r}, which is outside its folder")
    if member.issym():
        return SnapshotEntry(path=member.name, target=member.linkname)
    content = tar.extractfile(member) if member.isreg() else None
    if content is None:
        raise BadInput(
            f"the snapshot contains {member.name!r}, which is not a file, folder or symlink"
        )
    # `extractfile` returns a BufferedReader; typeshed only promises IO[bytes].
    sha256 = hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]
    mode = EXECUTABLE if member.mode & 0o100 else REGULAR
    return SnapshotEntry(path=member.name, mode=mode, size=member.size, sha256=sha256)
