"""Writing a raw shard with several threads: each hashes and writes pieces where they belong.

A tensor's bytes are cut into pieces of one size at fixed places, so neither the file nor its
digests depend on how rows arrived or on how many threads wrote them.
"""

from __future__ import annotations

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

# Buffers that one call of the system takes at most.
VECTORS = 512


class TaskExecutor(Protocol):
    """Something that does work, now or later."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]: ...


class InlineExecutor:
    """Does the work at once, in the thread that asks."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*arguments))
        return done


class WriterPool:
    """Threads with a bounded backlog: whoever asks for more waits, so memory stays bounded."""

    def __init__(self, threads: int, backlog: int):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="extract-writer")
        self._room = threading.BoundedSemaphore(backlog)

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        self._room.acquire()
        try:
            job = self._pool.submit(work, *arguments)
        except BaseException:
            self._room.release()
            raise
        job.add_done_callback(lambda _: self._room.release())
        return job

    def close(self) -> None:
        self._pool.shutdown()


class ShardWriter(Protocol):
    """Takes rows of each tensor in order; `finish` checks that all came."""

    def append(self, name: str, *parts: np.ndarray) -> None: ...

    def finish(self) -> shards.ShardFile: ...

    def abandon(self) -> None: ...


@dataclass
class _Stream:
    tensor: shards.Tensor
    written: int = 0
    digests: list[Any] = field(default_factory=list)  # of each piece
    last: Future[Any] | None = None  # the newest job, which may have left its piece open


class RawShardWriter:
    """Writes rows to their final place, without copying them."""

    def __init__(
        self,
        draft: Path,
        name: str,
        tensors: Iterable[shards.Tensor],
        executor: TaskExecutor | None = None,
    ):
        self._draft, self._name, self._hands = draft, name, executor or InlineExecutor()
        self._header, placed = shards.build_header(tensors)
        self._streams = {tensor.name: _Stream(tensor) for tensor in placed}
        self._size = len(self._header) + sum(tensor.nbytes for tensor in placed)
        self._jobs: list[Future[Any]] = []
        self._file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.ftruncate(self._file, self._size)
        write_at(self._file, [memoryview(self._header)], 0)

    def append(self, name: str, *parts: np.ndarray) -> None:
        """The parts' rows, one part after the other. They must not change until `finish`."""
        stream = self._streams[name]
        views = [shards.as_bytes(part, stream.tensor) for part in parts]
        size = sum(map(len, views))
        if stream.written + size > stream.tensor.nbytes:
            raise BadInput(f"{name}: more rows than the {stream.tensor.shape[0]} announced")
        for start, piece in split_pieces(views, stream.written):
            begun = start % PIECE != 0
            if not begun:
                stream.digests.append(hashlib.sha256())
            stream.last = self._hands.submit(
                self._put, stream, start, piece, stream.last if begun else None
            )
            self._jobs.append(stream.last)
        stream.written += size

    def finish(self) -> shards.ShardFile:
        for job in self._jobs:
            job.result()
        for stream in self._streams.values():
            if stream.written != stream.tensor.nbytes:
                raise BadInput(f"{stream.tensor.name}: rows are missing; the shard is not whole")
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
        """Also after `finish`, when what follows it failed."""
        for job in self._jobs:
            job.exception()  # until then a thread may still write to the file
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
        before: Future[Any] | None,
    ) -> None:
        if before is not None:
            before.result()  # it was asked for earlier, so a thread has it
        digest = stream.digests[start // PIECE]
        for view in views:
            digest.update(view)
        write_at(self._file, views, stream.tensor.offset + start)


def split_pieces(views: Iterable[memoryview], start: int) -> Iterator[tuple[int, list[memoryview]]]:
    """Consecutive bytes that begin at `start`, piece by piece: each piece's place and bytes."""
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
