"""Small named objects, in a folder or a bucket: what units of work are recorded in.

All that is asked of a store is that a name can be created once and that every write is whole.
"""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path
from typing import Protocol

from tpufleet.errors import BadInput, NotFound
from tpufleet.runtime import filesystem

# What file systems answer that have no hard links.
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class ObjectStore(Protocol):
    """A flat store of small named objects: a folder or a bucket. One that is `far`, where each
    answer takes a while, is asked many things at once."""

    def create(self, name: str, data: bytes) -> bool:
        """Write the whole object if the name is free; False when it is taken."""

    def replace(self, name: str, data: bytes) -> None: ...

    def read(self, name: str) -> bytes:
        """The object's bytes; raises NotFound."""

    def names(self, prefix: str) -> list[str]: ...


class FolderStore:
    """Objects as files. Every write is whole or absent, also after a power cut."""

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
            if error.errno not in NO_LINKS:
                raise
            raise BadInput(
                f"{self.path} is on a file system without hard links, where two could write one "
                "name; use another disk, or the bucket's own address"
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
            raise NotFound(f"{self.path / name} does not exist") from None

    def names(self, prefix: str) -> list[str]:
        folder, _, start = prefix.rpartition("/")
        try:
            found = os.listdir(self.path / folder)
        except FileNotFoundError:
            return []
        lead = f"{folder}/" if folder else ""
        return sorted(
            lead + entry for entry in found if entry.startswith(start) and not entry.startswith(".")
        )

    def _target(self, name: str) -> Path:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _draft(self, target: Path, data: bytes) -> Path:
        draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        with open(draft, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return draft
