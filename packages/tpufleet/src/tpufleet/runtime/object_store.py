"""A minimal object store, in a folder or a bucket, in which work units are recorded.

It needs only two guarantees: create-if-absent, and atomic writes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
import uuid
from pathlib import Path
from typing import Protocol

from tpufleet.errors import BadInput, missing
from tpufleet.runtime import filesystem

# Parallel requests to a bucket, where latency dominates.
PARALLEL_READS = 16
# Errors of file systems without hard links.
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_DRAFT_NAME = re.compile(r"\..+\.[0-9a-f]{32}")
STALE_DRAFT_SECONDS = 3600.0  # by far longer than any process needs one, or clocks differ


class ObjectStore(Protocol):
    """A flat store of small named objects. One with `far = True` has a high latency, so many
    requests are sent to it in parallel."""

    def create(self, name: str, data: bytes) -> bool:
        """Write the object unless the name exists; False when it does."""

    def replace(self, name: str, data: bytes) -> None: ...

    def read(self, name: str) -> bytes:
        """Raises NotFound."""

    def read_range(self, name: str, start: int, size: int) -> bytes:
        """Raises NotFound. Fewer bytes at the end of the object."""

    def names(self, prefix: str, start: str = "", end: str = "") -> list[str]:
        """Names with the prefix, sorted; from `start`, and before `end` unless that is empty."""

    def delete(self, name: str) -> None:
        """Delete the object; no error if it does not exist."""


class FolderStore:
    """Objects as files. Every write is atomic and durable, also across a power failure."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def create(self, name: str, data: bytes) -> bool:
        target = self._target(name)
        draft = self._draft(target, data)
        try:
            os.link(draft, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            raise BadInput(
                f"{self.path} is on a file system without hard links, so create-if-absent does not "
                "work there; use another disk, or the address of the bucket (gs:// or s3://)"
            ) from error
        finally:
            os.unlink(draft)
        filesystem.fsync(target.parent)
        return True

    def replace(self, name: str, data: bytes) -> None:
        target = self._target(name)
        os.replace(self._draft(target, data), target)
        filesystem.fsync(target.parent)

    def read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            raise missing(self.path / name) from None

    def read_range(self, name: str, start: int, size: int) -> bytes:
        try:
            with open(self.path / name, "rb") as file:
                file.seek(start)
                return file.read(size)
        except FileNotFoundError:
            raise missing(self.path / name) from None

    def names(self, prefix: str, start: str = "", end: str = "") -> list[str]:
        folder, _, head = prefix.rpartition("/")
        try:
            entries = os.listdir(self.path / folder)
        except FileNotFoundError:
            return []
        lead = f"{folder}/" if folder else ""
        return sorted(
            name
            for entry in entries
            if entry.startswith(head)
            and not entry.startswith(".")
            and (name := lead + entry) >= start
            and (not end or name < end)
        )

    def delete(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def remove_stale_drafts(self, *folders: str) -> None:
        """Delete what killed processes have left in these folders: drafts exist for an instant."""
        for folder in folders:
            with contextlib.suppress(FileNotFoundError), os.scandir(self.path / folder) as entries:
                stale = [
                    entry.path
                    for entry in entries
                    if _DRAFT_NAME.fullmatch(entry.name)
                    and time.time() - entry.stat().st_mtime > STALE_DRAFT_SECONDS
                ]
                for path in stale:
                    Path(path).unlink(missing_ok=True)

    def _target(self, name: str) -> Path:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _draft(self, target: Path, data: bytes) -> Path:
        draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            with open(draft, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:  # such as of a full disk
            draft.unlink(missing_ok=True)
            raise
        return draft
