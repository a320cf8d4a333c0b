"""Snapshots: tar.gz files of code, named by the digest of their content and verified against it.

An upload is packed again, with what its digest covers and nothing else. Otherwise one user could
upload a snapshot that has the digest of another user's code, and more in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import os
import tarfile
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar, TypeVarTuple, cast
from weakref import WeakValueDictionary

from starlette.concurrency import run_in_threadpool

from tpufleet.errors import BadInput, NotFound
from tpufleet.model.job.snapshots import (
    EXECUTABLE,
    LINK,
    REGULAR,
    SnapshotEntry,
    not_stored,
    require_digest,
    require_path,
    require_unpackable,
    snapshot_digest,
)
from tpufleet.service.files.bucket_files import Archive
from tpufleet.service.files.tar_reader import DAMAGED, TOO_LARGE, TarReader
from tpufleet.service.transport.limits import TooManyRequests

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

DEFAULT_LIMIT = 512 * 1024 * 1024  # of the upload
_MAX_INFLATION = 8  # unpacked size as a multiple of the limit; more is a decompression bomb
_MAX_ENTRIES = 200_000
MAX_UPLOADS_PER_USER = 16  # being received, waiting or repacked
MAX_REPACKS = 2  # at a time: seconds of CPU time each, which must not delay other requests
_MAX_NAMES = 24 * 1024 * 1024  # characters of all paths and link targets, which are kept in memory


class RepackQueue:
    """Repacks uploads in threads of its own. Each user has one turn at a time, so that
    many uploads of one user delay those of others by one. Used in the event loop only."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_REPACKS, thread_name_prefix="snapshots")
        self._uploads: Counter[str] = Counter()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.contextmanager
    def upload_of(self, user: str) -> Iterator[None]:
        """While an upload is in progress. Raises TooManyRequests."""
        if self._uploads[user] >= MAX_UPLOADS_PER_USER:
            raise TooManyRequests(f"{MAX_UPLOADS_PER_USER} uploads are in progress")
        self._uploads[user] += 1
        try:
            yield
        finally:
            self._uploads[user] -= 1
            if not self._uploads[user]:
                del self._uploads[user]

    @contextlib.asynccontextmanager
    async def turn_of(self, user: str) -> AsyncIterator[None]:
        """Waits while another upload of this user has its turn."""
        lock = self._turns.setdefault(user, asyncio.Lock())
        async with lock:
            yield

    async def run(self, work: Callable[[*Arguments], T], *args: *Arguments) -> T:
        """In a thread, once one is free."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


async def _stays_connected() -> bool:
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    chunks: AsyncIterator[bytes]
    user: str
    is_disconnected: Callable[[], Awaitable[bool]] = _stays_connected


class SnapshotFiles:
    """With an archive, a snapshot exists once the bucket has it, and is cached on disk."""

    def __init__(
        self, folder: Path, limit: int = DEFAULT_LIMIT, archive: Archive | None = None
    ) -> None:
        self._folder = folder
        self._archive = archive
        self.limit = limit
        self._repacks = RepackQueue()

    def path(self, digest: str) -> Path:
        require_digest(digest)
        return self._folder / f"{digest}.tar.gz"

    def has(self, digest: str) -> bool:
        path = self.path(digest)
        if self._archive is not None:  # another server may have deleted it
            return self._archive.has(_object_name(digest))
        return path.is_file()

    async def touch(self, digest: str) -> bool:
        """Whether it exists. If so, it is kept as if it was uploaded now."""
        return await run_in_threadpool(self._touch, digest)

    def _touch(self, digest: str) -> bool:
        with contextlib.suppress(FileNotFoundError):  # in the archive only, or not at all
            os.utime(self.path(digest))
        return self.has(digest)

    def require(self, digest: str) -> Path:
        path = self.path(digest)
        if self._archive is not None and not path.is_file():
            with contextlib.suppress(NotFound):
                self._archive.download(_object_name(digest), path)
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
        if self._archive is not None:
            self._archive.delete([_object_name(digest)])

    async def put(self, digest: str, upload: Upload) -> None:
        """Store an upload. It exists only once it is complete and matches its digest."""
        self.path(digest)  # rejects an invalid digest
        await self._store(upload, digest)

    async def add(self, upload: Upload) -> str:
        """Store an upload whose sender does not compute digests. Returns the digest."""
        return await self._store(upload, None)

    async def _store(self, upload: Upload, expected: str | None) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        # The draft has no name, so nothing is left of it when the server is killed.
        with (
            self._repacks.upload_of(upload.user),
            tempfile.TemporaryFile(dir=self._folder) as draft,
        ):
            size = 0
            async for chunk in upload.chunks:
                size += len(chunk)
                if size > self.limit:
                    raise BadInput(self.too_large_message())
                await run_in_threadpool(draft.write, chunk)
            async with self._repacks.turn_of(upload.user):
                if await upload.is_disconnected():
                    raise BadInput("the connection was closed before the upload was stored")
                return await self._repacks.run(self._accept, draft, expected)

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
                    digest = _pack_again(draft, out, self.limit * _MAX_INFLATION)
                except DAMAGED as error:
                    raise BadInput(f"the snapshot is not a valid tar.gz: {error}") from error
                if expected not in (None, digest):
                    raise BadInput(
                        f"the snapshot has digest {digest}, not {expected}; upload it again"
                    )
                out.flush()
                os.fsync(out.fileno())
            os.replace(name, self.path(digest))
        except BaseException:
            os.unlink(name)
            raise
        if self._archive is not None:
            self._archive.upload(_object_name(digest), self.path(digest))
        return digest


def _object_name(digest: str) -> str:
    return f"snapshots/{digest}.tar.gz"


def _pack_again(file: IO[bytes], out: IO[bytes], limit: int) -> str:
    """The digest, which does not cover folders. Raises BadInput, or one of `DAMAGED`. The order of
    the entries stays."""
    total = count = names = 0
    entries = []
    folders: list[str] = []
    tar = TarReader(file, limit + _MAX_ENTRIES * tarfile.BLOCKSIZE * 4)
    zipped = gzip.GzipFile(filename="", fileobj=out, mode="wb", compresslevel=6, mtime=0)
    with zipped, tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as copy:
        while (entry := tar.next_entry()) is not None:
            # It keeps all of them, with their headers. Not in typeshed.
            copy.members.clear()  # type: ignore[attr-defined]
            count, total = count + 1, total + entry.size
            names += len(entry.name) + len(entry.linkname)
            if total > limit or count > _MAX_ENTRIES or names > _MAX_NAMES:
                raise BadInput(TOO_LARGE)
            require_path(entry.name)
            if entry.isdir():
                folders.append(entry.name)
            else:
                entries.append(_copy_entry(tar, entry, copy))
    require_unpackable(entries, folders)
    return snapshot_digest(entries)


def _copy_entry(tar: TarReader, entry: tarfile.TarInfo, copy: tarfile.TarFile) -> SnapshotEntry:
    bare = tarfile.TarInfo(entry.name)
    if entry.issym():
        bare.type, bare.linkname, bare.mode = tarfile.SYMTYPE, entry.linkname, LINK
        copy.addfile(bare)
        return SnapshotEntry(path=entry.name, mode=LINK, target=entry.linkname)
    if not entry.isreg():
        raise not_stored(entry.name)
    bare.size, bare.mode = entry.size, EXECUTABLE if entry.mode & 0o100 else REGULAR
    reader = _HashingReader(tar)
    copy.addfile(bare, cast(IO[bytes], reader))
    return SnapshotEntry(
        path=entry.name, mode=bare.mode, size=bare.size, sha256=reader.sha256.hexdigest()
    )


class _HashingReader:
    def __init__(self, tar: TarReader) -> None:
        self._tar = tar
        self.sha256 = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._tar.read(size)
        self.sha256.update(data)
        return data
