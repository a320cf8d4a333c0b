"""Snapshots: tar.gz files of code, named by the digest of their content and verified against it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO

from starlette.concurrency import run_in_threadpool

from tpufleet.errors import BadInput, NotFound
from tpufleet.model.snapshots import EXECUTABLE, REGULAR, SnapshotEntry, is_digest, snapshot_digest

DEFAULT_LIMIT = 512 * 1024 * 1024  # of the upload
_MAX_INFLATION = 8  # unpacked size as a multiple of the limit; more is a decompression bomb
_MAX_ENTRIES = 200_000


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
        path = self.path(digest)
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".upload-") as draft:
            size = 0
            async for chunk in chunks:
                size += len(chunk)
                if size > self.limit:
                    raise BadInput(self.too_large_message())
                await run_in_threadpool(draft.write, chunk)
            await run_in_threadpool(self._accept, draft.file, Path(draft.name), path, digest)

    def too_large_message(self) -> str:
        return (
            f"the snapshot is larger than {self.limit // 2**20} MiB; exclude data and outputs with "
            "a .tpuignore or .gitignore file"
        )

    def _accept(self, draft: IO[bytes], name: Path, path: Path, digest: str) -> None:
        draft.flush()
        os.fsync(draft.fileno())
        draft.seek(0)
        try:
            actual = snapshot_digest(_entries(draft, self.limit * _MAX_INFLATION))
        except (tarfile.TarError, EOFError, OSError, ValueError) as error:
            raise BadInput(f"the snapshot is not a valid tar.gz: {error}") from error
        if actual != digest:
            raise BadInput(f"the snapshot has digest {actual}, not {digest}; upload it again")
        with contextlib.suppress(FileExistsError):  # uploaded twice at the same time
            os.link(name, path)


def _entries(file: IO[bytes], limit: int) -> Iterator[SnapshotEntry]:
    total = count = 0
    with tarfile.open(fileobj=file, mode="r|gz") as tar:
        for member in tar:
            count, total = count + 1, total + member.size
            if total > limit or count > _MAX_ENTRIES:
                raise BadInput("the snapshot is too large when unpacked")
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
