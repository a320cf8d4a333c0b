"""Writing a raw shard with several threads, which hash and write pieces at their final offsets.

A tensor's bytes are divided into pieces at fixed offsets, so neither the file nor its digests
depend on how rows arrive or how many threads write them. The bytes go to a file on a local disk
(`DraftFile`), or are kept where they are until they are uploaded (`MemoryFile`).
"""

from __future__ import annotations

import ctypes
import io
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from tpufleet_activations.io import shards
from tpufleet_activations.io.shards import PIECE

# What a thread hashes and writes at once: whole pieces. In smaller tasks the threads would spend
# their time passing the interpreter lock to each other.
TASK = 4 * PIECE
# Buffers per pwritev call, below the system limit of 1,024.
VECTORS = 512
SYNC_FILE_RANGE_WRITE = 2  # start writing, and do not wait: linux/fs.h
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux only
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class InlineWriter(Executor):
    """Runs each task immediately, in the calling thread."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*arguments, **named))
        return future


class WriterPool(ThreadPoolExecutor):
    """Threads with a bounded backlog: `submit` blocks when it is full, so memory stays bounded."""

    def __init__(self, threads: int, backlog: int):
        super().__init__(threads, thread_name_prefix="extract-writer")
        self._slots = threading.BoundedSemaphore(backlog)

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        self._slots.acquire()
        try:
            future = super().submit(work, *arguments, **named)
        except BaseException:
            self._slots.release()
            raise
        future.add_done_callback(lambda _: self._slots.release())
        return future


@dataclass
class _Stream:
    tensor: shards.Tensor
    written: int = 0
    digests: dict[int, Any] = field(default_factory=dict)  # of each piece
    last: Future[Any] | None = None  # the latest task, whose last piece may be incomplete

    def digest(self, piece: int) -> Any:
        """Used by one thread at a time."""
        if piece not in self.digests:
            self.digests[piece] = blake3()
        return self.digests[piece]


class DraftFile:
    """A file on a local disk, durable once finished. Takes bytes at their offsets, in any order and
    from several threads."""

    def __init__(self, path: Path):
        self.path, self._file = path, -1
        # The kernel lets one thread at a time write to a file, and others use a core to wait.
        self._one_writer = threading.Lock()

    def open(self, size: int) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.ftruncate(self._file, size)

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        with self._one_writer:
            write_at(self._file, views, offset)
        start_writeback(self._file, offset, sum(map(len, views)))

    def finish(self) -> None:
        os.fsync(self._file)
        self._close()

    def abandon(self) -> None:
        """Delete what was written. Also valid after `finish`."""
        self._close()
        self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class MemoryFile:
    """A file that is never on a disk: references to the bytes, which are read when it is uploaded.
    The rows of a batch are freed once every file that holds some of them has been uploaded."""

    def __init__(self) -> None:
        self._views: list[tuple[int, Sequence[memoryview]]] = []

    def open(self, size: int) -> None:
        self._views = []

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        self._views.append((offset, views))

    def finish(self) -> None:
        self._views.sort(key=lambda item: item[0])

    def abandon(self) -> None:
        self._views = []

    def stream(self) -> BufferStream:
        return BufferStream([view for _, views in self._views for view in views])


ShardTarget = DraftFile | MemoryFile


class BufferStream(io.RawIOBase):
    """Buffers one after the other. Clients of buckets seek in it to retry or resume an upload."""

    def __init__(self, views: Sequence[memoryview]):
        self._views = views
        self._starts = list(accumulate(map(len, views), initial=0))
        self.size, self._at = self._starts.pop(), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        self._at = min(max(base + offset, 0), self.size)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """With a single copy, however many buffers."""
        left = self.size - self._at if size is None or size < 0 else size
        parts = []
        while left > 0 and self._at < self.size:
            part = self._next(left)
            parts.append(part)
            self._at, left = self._at + len(part), left - len(part)
        return b"".join(parts)

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        part = self._next(len(buffer)) if self._at < self.size else b""
        memoryview(buffer)[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _next(self, most: int) -> memoryview:
        number = bisect_right(self._starts, self._at) - 1
        return self._views[number][self._at - self._starts[number] :][:most]


class RawShardWriter:
    """Writes rows to their final offsets, without copying them."""

    def __init__(
        self,
        target: ShardTarget,
        name: str,
        tensors: Iterable[shards.Tensor],
        executor: Executor | None = None,
    ):
        self._target, self._name, self._executor = target, name, executor or InlineWriter()
        self._header, positioned = shards.build_header(tensors)
        self._streams = {tensor.name: _Stream(tensor) for tensor in positioned}
        self._size = len(self._header) + sum(tensor.nbytes for tensor in positioned)
        self._tasks: list[Future[Any]] = []
        target.open(self._size)
        target.write([memoryview(self._header)], 0)

    def append(self, name: str, *parts: np.ndarray) -> None:
        """Append the rows of each part in order. They must not change until `finish`."""
        stream = self._streams[name]
        views = [shards.as_bytes(part, stream.tensor) for part in parts]
        size = sum(map(len, views))
        if stream.written + size > stream.tensor.nbytes:
            raise shards.wrong_rows(stream.tensor.name, stream.tensor.shape[0])
        for start, chunk in split_pieces(views, stream.written, TASK):
            previous = stream.last if start % PIECE else None
            stream.last = self._executor.submit(self._put, stream, start, chunk, previous)
            self._tasks.append(stream.last)
        stream.written += size

    def finish(self) -> shards.ShardFile:
        for task in self._tasks:
            task.result()
        for stream in self._streams.values():
            if stream.written != stream.tensor.nbytes:
                raise shards.wrong_rows(stream.tensor.name, stream.tensor.shape[0])
        self._target.finish()
        return shards.describe_file(
            self._name,
            self._size,
            self._header,
            (
                shards.with_digest(
                    stream.tensor, [digest.digest() for _, digest in sorted(stream.digests.items())]
                )
                for stream in self._streams.values()
            ),
        )

    def abandon(self) -> None:
        """Delete what was written. Also valid after `finish`, when the upload failed."""
        for task in self._tasks:
            task.exception()  # until then a thread may still write to the file
        self._target.abandon()

    def _put(
        self,
        stream: _Stream,
        start: int,
        views: Sequence[memoryview],
        previous: Future[Any] | None,
    ) -> None:
        if previous is not None:
            previous.result()  # submitted earlier, so a thread is already running it
        for first, piece in split_pieces(views, start):
            digest = stream.digest(first // PIECE)
            for view in piece:
                digest.update(view)
        self._target.write(views, stream.tensor.offset + start)


def start_writeback(file: int, offset: int, size: int) -> None:
    """Let the kernel write these bytes to the disk now instead of at the fsync, which then finds
    little left to do. A hint: without the call, or where it fails, nothing else changes."""
    if _sync_file_range is not None:
        _sync_file_range(file, offset, size, SYNC_FILE_RANGE_WRITE)


def split_pieces(
    views: Iterable[memoryview], start: int, size: int = PIECE
) -> Iterator[tuple[int, list[memoryview]]]:
    """Split consecutive bytes that begin at offset `start` into (offset, bytes) of each piece."""
    piece: list[memoryview] = []
    begin = position = start
    for view in views:
        while view:
            room = size - position % size
            piece.append(view[:room])
            position += len(piece[-1])
            view = view[room:]
            if position % size == 0:
                yield begin, piece
                piece, begin = [], position
    if piece:
        yield begin, piece


def write_at(file: int, views: Sequence[memoryview], offset: int) -> None:
    at, left = 0, list(views)
    while at < len(left):
        done = os.pwritev(file, left[at : at + VECTORS], offset)
        offset += done
        while at < len(left) and done >= len(left[at]):
            done -= len(left[at])
            at += 1
        if done:
            left[at] = left[at][done:]
