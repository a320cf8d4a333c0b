"""Shards written past the page cache (O_DIRECT): the disk reads them from aligned memory.

The kernel then neither copies nor keeps them, and nothing is left to write at the end. Offsets,
sizes and addresses have to be aligned (open(2)). Rows are wherever they fall, so what one call
writes is divided into whole blocks and edges, which the neighbouring calls complete. Blocks are
written from where they are if that is aligned too, such as the page-locked memory that the rows of
a GPU arrive in, and from an aligned copy otherwise.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tpufleet_activations.io.aligned_memory import MemoryPool
from tpufleet_activations.io.shard_writer import TASK, DraftFile
from tpufleet_activations.io.shards import DIRECT_BLOCK as BLOCK

O_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux
# What a file system answers that does not take such a write.
REFUSALS = (errno.EINVAL, errno.EFAULT, errno.ENOTSUP)
IN_MEMORY = ("tmpfs", "ramfs")  # newer kernels accept the flag there, and copy all the same
_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)  # Linux
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def takes_direct_writes(folder: Path) -> bool:
    """Whether the file system of a folder does, tried with a small file."""
    if not O_DIRECT or _file_system(folder) in IN_MEMORY:
        return False
    path = folder / f"direct-{os.getpid()}-{threading.get_ident()}"
    target = DirectFile(path, MemoryPool())
    try:
        target.open(BLOCK)
        target.write([memoryview(bytes(BLOCK))], 0)
        return target.direct
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return False
    finally:
        target.abandon()


def _file_system(folder: Path) -> str:
    """The type of a folder's file system, such as ext4; "" if it is not in the table of mounts."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for mount in mounts:
        fields = mount.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1]
    return ""


@dataclass
class _Edge:
    """A block that several calls complete."""

    content: np.ndarray
    filled: int = 0


class DirectFile(DraftFile):
    """A file on a local disk, durable once finished."""

    def __init__(self, path: Path, memory: MemoryPool):
        super().__init__(path)
        self._memory, self._size = memory, 0
        self._edges: dict[int, _Edge] = {}  # by offset
        self._lock = threading.Lock()
        self.direct = True  # until the file system refuses

    def open(self, size: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | O_DIRECT
        self._file, self._size = os.open(self.path, flags, 0o644), size
        # Without it each write would have to extend the file, one at a time.
        if size and _fallocate is not None and _fallocate(self._file, 0, 0, size) < 0:
            error = ctypes.get_errno()
            if error not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise OSError(error, os.strerror(error), str(self.path))

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        size = sum(map(len, views))
        low, first = offset // BLOCK * BLOCK, -(-offset // BLOCK) * BLOCK
        last, end = (offset + size) // BLOCK * BLOCK, offset + size
        whole = _aligned(views, first - offset, last - first) if first < last else None
        if whole is not None and self._try(whole, first):
            self._edge(_part(views, 0, first - offset), offset)
            self._edge(_part(views, last - offset, end - last), last)
            return
        copy = self._memory.take(max(TASK + 2 * BLOCK, end - low))
        at = offset - low
        for view in views:
            copy[at : at + len(view)] = np.frombuffer(view, np.uint8)
            at += len(view)
        if first >= last:
            middle = min(first, end)  # the write may cross from one block to the next
            self._edge(copy[offset - low : middle - low], offset)
            self._edge(copy[middle - low : end - low], middle)
            return
        self._write_block(copy[first - low : last - low], first)
        self._edge(copy[offset - low : first - low], offset)
        self._edge(copy[last - low : end - low], last)

    def _edge(self, content: np.ndarray, offset: int) -> None:
        """Add bytes to the block that holds them, and write it once it is complete."""
        if not len(content):
            return
        start = offset // BLOCK * BLOCK
        with self._lock:
            if start not in self._edges:
                block = self._memory.take(BLOCK)
                block[:] = 0
                self._edges[start] = _Edge(block)
            edge = self._edges[start]
            edge.content[offset - start : offset - start + len(content)] = content
            edge.filled += len(content)
            if edge.filled < min(BLOCK, self._size - start):
                return
            del self._edges[start]
        self._write_block(edge.content, start)

    def _write_block(self, content: np.ndarray, offset: int) -> None:
        """Write aligned memory."""
        if self._try(content, offset):
            return
        # The file system takes no direct writes after all.
        self.direct = False
        fcntl.fcntl(self._file, fcntl.F_SETFL, 0)
        _write_all(self._file, content, offset)

    def _try(self, content: np.ndarray, offset: int) -> bool:
        try:
            _write_all(self._file, content, offset)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            return False
        return True

    def finish(self) -> None:
        assert not self._edges, "bytes are missing"
        os.ftruncate(self._file, self._size)  # the last block was written as a whole
        super().finish()

    def abandon(self) -> None:
        self._edges = {}
        super().abandon()


def _aligned(views: Sequence[memoryview], start: int, size: int) -> np.ndarray | None:
    """These bytes in place, if they are in one buffer and on a block boundary of memory."""
    for view in views:
        if start < len(view):
            content = np.frombuffer(view, np.uint8)[start : start + size]
            fits = len(content) == size and content.ctypes.data % BLOCK == 0
            return content if fits else None
        start -= len(view)
    return None


def _part(views: Sequence[memoryview], start: int, size: int) -> np.ndarray:
    """A copy of these few bytes."""
    parts = []
    for view in views:
        parts.append(np.frombuffer(view, np.uint8)[max(start, 0) : max(start + size, 0)])
        start -= len(view)
    return np.concatenate(parts)


def _write_all(file: int, content: np.ndarray, offset: int) -> None:
    left = content.data
    while left:
        done = os.pwrite(file, left, offset)
        left, offset = left[done:], offset + done
