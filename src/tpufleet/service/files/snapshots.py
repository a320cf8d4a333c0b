"""Snapshots: tar.gz files of code, named by the digest of their content and verified against it.

An upload is packed again, with what its digest covers and nothing else. Otherwise one user could
upload a snapshot that has the digest of another user's code, and more in it.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import logging
import os
import tarfile
import tempfile
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from starlette.concurrency import run_in_threadpool

from tpufleet.errors import BadInput, NotFound
from tpufleet.model.snapshots import (
    EXECUTABLE,
    LINK,
    REGULAR,
    SnapshotEntry,
    is_digest,
    require_path,
    require_unpackable,
    snapshot_digest,
)

log = logging.getLogger(__name__)

DEFAULT_LIMIT = 512 * 1024 * 1024  # of the upload
_MAX_INFLATION = 8  # unpacked size as a multiple of the limit; more is a decompression bomb
_MAX_ENTRIES = 200_000
_MAX_NAMES = 24 * 1024 * 1024  # characters of all paths and link targets, which are kept in memory
_DAMAGED = (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile, ValueError)
# A path or link target is at most 4 KiB; `tarfile` reads 10 KiB ahead.
_MAX_HEADER_BYTES = 64 * 1024


class SnapshotFiles:
    def __init__(self, folder: Path, limit: int = DEFAULT_LIMIT) -> None:
        self._folder = folder
        self.limit = limit
        self._intact: set[str] = set()  # digests; earlier releases stored uploads as they came

    def path(self, digest: str) -> Path:
        if not is_digest(digest):
            raise BadInput(f"invalid digest {digest[:80]!r}: expected 64 hexadecimal digits")
        return self._folder / f"{digest}.tar.gz"

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def touch(self, digest: str) -> bool:
        """Whether it exists and needs no other upload. If so, it is kept as if it was uploaded
        now."""
        with contextlib.suppress(FileNotFoundError):  # in the archive only, or not at all
            os.utime(self.path(digest))
        return self.has(digest) and self._is_intact(digest)

    def _is_intact(self, digest: str) -> bool:
        if digest not in self._intact:
            try:
                with self.require(digest).open("rb") as stored, open(os.devnull, "wb") as out:
                    packed = _pack_again(stored, out, self.limit * _MAX_INFLATION)
            except (*_DAMAGED, BadInput) as error:
                log.warning(
                    "snapshot %s is damaged; the next upload replaces it: %s", digest, error
                )
                return False
            if packed.digest != digest or packed.folders:
                log.warning(
                    "snapshot %s is not what its digest names; the next upload replaces it", digest
                )
                return False
            self._intact.add(digest)
        return True

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
            return await run_in_threadpool(self._accept, draft.file, expected)

    def too_large_message(self) -> str:
        return (
            f"the snapshot is larger than {self.limit // 2**20} MiB; exclude data and outputs with "
            "a .tpuignore or .gitignore file"
        )

    def _accept(self, draft: IO[bytes], expected: str | None) -> str:
        draft.flush()
        draft.seek(0)
        descriptor, name = tempfile.mkstemp(dir=self._folder, prefix=".upload-")
        try:
            with open(descriptor, "wb") as out:
                try:
                    packed = _pack_again(draft, out, self.limit * _MAX_INFLATION)
                except _DAMAGED as error:
                    raise BadInput(f"the snapshot is not a valid tar.gz: {error}") from error
                if expected not in (None, packed.digest):
                    raise BadInput(
                        f"the snapshot has digest {packed.digest}, not {expected}; upload it again"
                    )
                out.flush()
                os.fsync(out.fileno())
            os.replace(name, self.path(packed.digest))
        except BaseException:
            os.unlink(name)
            raise
        self._intact.add(packed.digest)
        return packed.digest


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packed:
    digest: str
    folders: int  # entries of folders, which the digest does not cover


def _pack_again(file: IO[bytes], out: IO[bytes], limit: int) -> _Packed:
    """Raises BadInput, or one of `_DAMAGED`. The order of the entries stays."""
    total = count = folders = names = 0
    entries = []
    stream = _TarStream(file, limit + _MAX_ENTRIES * tarfile.BLOCKSIZE * 4)
    zipped = gzip.GzipFile(filename="", fileobj=out, mode="wb", compresslevel=6, mtime=0)
    with (
        zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as copy,
        # `tarfile` only calls `read`.
        tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|") as tar,
    ):
        while (member := tar.next()) is not None:
            # They keep all of them, with their headers. Not in typeshed.
            tar.members.clear()  # type: ignore[attr-defined]
            copy.members.clear()  # type: ignore[attr-defined]
            count, total = count + 1, total + member.size
            names += len(member.name) + len(member.linkname)
            if total > limit or count > _MAX_ENTRIES or names > _MAX_NAMES:
                raise BadInput("the snapshot is too large when unpacked")
            stream.allow_content(member.size)
            require_path(member.name)
            if member.isdir():
                folders += 1
            else:
                entries.append(_copy_entry(tar, member, copy))
    require_unpackable(entries)
    return _Packed(digest=snapshot_digest(entries), folders=folders)


def _copy_entry(
    tar: tarfile.TarFile, member: tarfile.TarInfo, copy: tarfile.TarFile
) -> SnapshotEntry:
    bare = tarfile.TarInfo(member.name)
    if member.issym():
        bare.type, bare.linkname, bare.mode = tarfile.SYMTYPE, member.linkname, LINK
        copy.addfile(bare)
        return SnapshotEntry(path=member.name, mode=LINK, target=member.linkname)
    content = tar.extractfile(member) if member.isreg() else None
    if content is None:
        raise BadInput(
            f"the snapshot contains {member.name!r}, which is not a file, folder or symlink"
        )
    bare.size, bare.mode = member.size, EXECUTABLE if member.mode & 0o100 else REGULAR
    reader = _HashingReader(content)
    copy.addfile(bare, cast(IO[bytes], reader))
    return SnapshotEntry(
        path=member.name, mode=bare.mode, size=bare.size, sha256=reader.sha256.hexdigest()
    )


class _HashingReader:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.sha256.update(data)
        return data
