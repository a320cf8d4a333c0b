"""Writing a raw shard with several threads, which hash and write pieces at their final offsets.

A tensor's bytes are divided into pieces at fixed offsets, so neither the file nor its digests
depend on how rows arrive or how many threads write them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tpufleet.errors import BadInput
from tpufleet.workloads.activations.io import shards
from tpufleet.workloads.activations.io.shards import PIECE

# Buffers per pwritev call, below the system limit of 1,024.
VECTORS = 512
SYNC_FILE_RANGE_WRITE = 2  # start writing, and do not wait: linux/fs.h
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux only
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class TaskExecutor(Protocol):
    """Runs tasks, immediately or later."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]: ...


class InlineWriter:
    """Runs each task immediately, in the calling thread."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*arguments))
        return future


class WriterPool:
    """Threads with a bounded backlog: `submit` blocks when it is full, so memory stays bounded."""

    def __init__(self, threads: int, backlog: int):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="extract-writer")
        self._slots = threading.BoundedSemaphore(backlog)

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        self._slots.acquire()
        try:
            future = self._pool.submit(work, *arguments)
        except BaseException:
            self._slots.release()
            raise
        future.add_done_callback(lambda _: self._slots.release())
        return future

    def close(self) -> None:
        self._pool.shutdown()


class ShardWriter(Protocol):
    """Takes the rows of each tensor in order; `finish` checks that none is missing."""

    def append(self, name: str, *parts: np.ndarray) -> None: ...

    def finish(self) -> shards.ShardFile: ...

    def abandon(self) -> None: ...


@dataclass
class _Stream:
    tensor: shards.Tensor
    written: int = 0
    digests: list[Any] = field(default_factory=list)  # one per piece
    last: Future[Any] | None = None  # the latest task, whose piece may be incomplete


class RawShardWriter:
    """Writes rows to their final offsets, without copying them."""

    def __init__(
        self,
        draft: Path,
        name: str,
        tensors: Iterable[shards.Tensor],
        executor: TaskExecutor | None = None,
    ):
        self._draft, self._name, self._executor = draft, name, executor or InlineWriter()
        self._header, positioned = shards.build_header(tensors)
        self._streams = {tensor.name: _Stream(tensor) for tensor in positioned}
        self._size = len(self._header) + sum(tensor.nbytes for tensor in positioned)
        self._tasks: list[Future[Any]] = []
        self._file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.ftruncate(self._file, self._size)
        write_at(self._file, [memoryview(self._header)], 0)

    def append(self, name: str, *parts: np.ndarray) -> None:
        """Append the rows of each part in order. They must not change until `finish`."""
        stream = self._streams[name]
        views = [shards.as_bytes(part, stream.tensor) for part in parts]
        size = sum(map(len, views))
        if stream.written + size > stream.tensor.nbytes:
            raise BadInput(f"{name}: more rows than the expected {stream.tensor.shape[0]}")
        for start, piece in split_pieces(views, stream.written):
            continues = start % PIECE != 0
            if not continues:
                stream.digests.append(hashlib.sha256())
            stream.last = self._executor.submit(
                self._put, stream, start, piece, stream.last if continues else None
            )
            self._tasks.append(stream.last)
        stream.written += size

    def finish(self) -> shards.ShardFile:
        for task in self._tasks:
            task.result()
        for stream in self._streams.values():
            if stream.written != stream.tensor.nbytes:
                raise BadInput(f"{stream.tensor.name}: rows are missing; the shard is incomplete")
        os.fsync(self._file)
        self._close()
        return shards.describe_file(
            self._name,
            self._size,
            self._header,
            (
                shards.with_digest(stream.tensor, [piece.digest() for piece in stream.digests])
                for stream in self._streams.values()
            ),
        )

    def abandon(self) -> None:
        """Delete the draft. Also valid after `finish`, when the upload failed."""
        for task in self._tasks:
            task.exception()  # until then a thread may still write to the file
        self._close()
        self._draft.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _put(
        self,
        stream: _Stream,
        start: int,
        views: Sequence[memoryview],
        previous: Future[Any] | None,
    ) -> None:
        if previous is not None:
            previous.result()  # submitted earlier, so a thread is already running it
        digest = stream.digests[start // PIECE]
        for view in views:
            digest.update(view)
        offset = stream.tensor.offset + start
        write_at(self._file, views, offset)
        start_writeback(self._file, offset, sum(map(len, views)))


def start_writeback(file: int, offset: int, size: int) -> None:
    """Let the kernel write these bytes to the disk now instead of at the fsync, which then finds
    little left to do. A hint: without the call, or where it fails, nothing else changes."""
    if _sync_file_range is not None:
        _sync_file_range(file, offset, size, SYNC_FILE_RANGE_WRITE)


def split_pieces(views: Iterable[memoryview], start: int) -> Iterator[tuple[int, list[memoryview]]]:
    """Split consecutive bytes that begin at offset `start` into (offset, bytes) of each piece."""
    piece: list[memoryview] = []
    begin = position = start
    for view in views:
        while view:
            room = PIECE - position % PIECE
            piece.append(view[:room])
            position += len(piece[-1])
            view = view[room:]
            if position % PIECE == 0:
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
