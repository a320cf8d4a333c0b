"""Zstd shards: rows compressed in chunks, grouped by byte significance, with a table of chunks.

Smaller than raw shards, and still readable by (site, sample) without reading the whole shard.
"""

from __future__ import annotations

import io
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from tpufleet_activations.io import dtypes, shard_writer, shards

# The low bytes of activations are noise: higher levels cost time and save nothing.
LEVEL = 1
CHUNKS = ".chunks"  # suffix of a tensor's table: first row, first byte, size in bytes


@dataclass
class _Chunks:
    """The chunks of one tensor so far: first row, and the task that returns (offset, size)."""

    rows: int = 0
    spooled: list[tuple[int, Future[tuple[int, int]]]] = field(default_factory=list)


class ZstdShardWriter:
    """Like `RawShardWriter`, but compresses the tensors named in `compressed`.

    The header comes first and contains sizes that are known only after compression. So chunks are
    written to a file beside that of `target` in the order in which threads finish, and copied from
    there. If that is in memory, so are they.
    """

    def __init__(
        self,
        target: shard_writer.ShardTarget,
        name: str,
        tensors: Iterable[shards.Tensor],
        compressed: Iterable[str],
        executor: Executor | None = None,
    ):
        self._target, self._name = target, name
        self._executor = executor or shard_writer.InlineWriter()
        self._plain = {tensor.name: tensor for tensor in tensors}
        self._compressed = frozenset(compressed)
        self._chunks = {name: _Chunks() for name in self._plain}
        self._spool = _Spool(
            target.path.parent if isinstance(target, shard_writer.DraftFile) else None
        )
        self._writer: shard_writer.RawShardWriter | None = None

    def append(self, name: str, *parts: np.ndarray) -> None:
        """Append the rows of each part in order. They must not change until `finish`."""
        tensor, chunks = self._plain[name], self._chunks[name]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        shards.as_bytes(rows[:0], tensor)  # checks dtype and shape
        height = max(shards.PIECE // max(tensor.row_bytes, 1), 1)
        for start in range(0, len(rows), height):
            task = self._executor.submit(self._put, name, rows[start : start + height])
            chunks.spooled.append((chunks.rows + start, task))
        chunks.rows += len(rows)

    def _put(self, name: str, rows: np.ndarray) -> tuple[int, int]:
        """Compress rows and append them to the spool; returns (offset, size)."""
        data = shards.as_bytes(rows, self._plain[name])
        packed = compress(data, rows.dtype.itemsize) if name in self._compressed else data
        return self._spool.put(packed), len(packed)

    def finish(self) -> shards.ShardFile:
        spooled = {
            name: [(row, *task.result()) for row, task in chunks.spooled]
            for name, chunks in self._chunks.items()
        }
        for name, tensor in self._plain.items():
            if self._chunks[name].rows != tensor.shape[0]:
                raise shards.wrong_rows(name, tensor.shape[0])
        tensors, tables = self._stored_tensors(spooled)
        self._writer = shard_writer.RawShardWriter(
            self._target, self._name, tensors, self._executor
        )
        for tensor in tensors:
            if tensor.name in tables:
                self._writer.append(tensor.name, tables[tensor.name])
            for _, offset, size in spooled.get(tensor.name, ()):
                data = np.frombuffer(self._spool.get(offset, size), np.uint8)
                rows = data.view(dtypes.NUMPY_DTYPES[tensor.dtype]).reshape(-1, *tensor.shape[1:])
                self._writer.append(tensor.name, rows)
        file = self._writer.finish()
        self._spool.close()
        uncompressed = {
            name: (self._plain[name].dtype, self._plain[name].shape) for name in self._compressed
        }
        return replace(file, uncompressed=uncompressed)

    def _stored_tensors(
        self, spooled: dict[str, list[tuple[int, int, int]]]
    ) -> tuple[list[shards.Tensor], dict[str, np.ndarray]]:
        """The tensors as stored, and the chunk tables of the compressed ones."""
        tensors, tables = [], {}
        for name, tensor in self._plain.items():
            if name not in self._compressed:
                tensors.append(tensor)
                continue
            sizes = [size for _, _, size in spooled[name]]
            starts = np.cumsum([0, *sizes])[:-1]
            rows = [row for row, _, _ in spooled[name]]
            table = np.array([rows, starts, sizes], np.int64).T.reshape(-1, 3)
            tables[name + CHUNKS] = np.ascontiguousarray(table)
            tensors.append(replace(tensor, dtype="U8", shape=(sum(sizes),)))
            tensors.append(shards.Tensor(name=name + CHUNKS, dtype="I64", shape=table.shape))
        return tensors, tables

    def abandon(self) -> None:
        for chunks in self._chunks.values():
            for _, task in chunks.spooled:
                task.exception()  # until then a thread may still write to the spool
        if self._writer is not None:
            self._writer.abandon()
        self._spool.close()
        self._target.abandon()


class _Spool:
    """Compressed chunks, by offset: in a file without a name, or without a folder in memory."""

    def __init__(self, folder: Path | None):
        self._file = tempfile.TemporaryFile(dir=folder) if folder else io.BytesIO()  # noqa: SIM115
        self._lock = threading.Lock()

    def put(self, data: bytes | memoryview) -> int:
        with self._lock:
            offset = self._file.seek(0, io.SEEK_END)
            self._file.write(data)
        return offset

    def get(self, offset: int, size: int) -> bytes:
        with self._lock:
            self._file.seek(offset)
            return self._file.read(size)

    def close(self) -> None:
        self._file.close()


def compress(data: memoryview, itemsize: int) -> bytes:
    import zstandard  # an optional dependency

    planes = np.frombuffer(data, np.uint8).reshape(-1, itemsize).T
    return zstandard.ZstdCompressor(level=LEVEL).compress(np.ascontiguousarray(planes).data)


def decompress(data: bytes | memoryview, dtype: str, row_shape: tuple[int, ...]) -> np.ndarray:
    import zstandard

    kind = dtypes.NUMPY_DTYPES[dtype]
    planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint8)
    flat = np.ascontiguousarray(planes.reshape(kind.itemsize, -1).T).reshape(-1)
    return flat.view(kind).reshape(-1, *row_shape)


def read_rows(
    shard: shards.ShardFile,
    name: str,
    start: int,
    stop: int,
    read: Callable[[str, int, int], bytes],
) -> np.ndarray:
    """Rows start … stop of a compressed tensor. `read(tensor, offset, size)` returns its bytes."""
    dtype, shape = shard.uncompressed[name]
    if start >= stop:
        return np.empty((0, *shape[1:]), dtypes.NUMPY_DTYPES[dtype])
    table_at = shard.tensors[name + CHUNKS]
    table = np.frombuffer(read(name + CHUNKS, 0, table_at.nbytes), np.int64).reshape(-1, 3)
    first = max(int(np.searchsorted(table[:, 0], start, "right")) - 1, 0)
    last = int(np.searchsorted(table[:, 0], stop, "left"))
    # Adjacent chunks are read with one call.
    begin, end = int(table[first, 1]), int(table[last - 1, 1] + table[last - 1, 2])
    data = memoryview(read(name, begin, end - begin))
    chunks = [
        decompress(data[offset - begin : offset - begin + size], dtype, shape[1:])
        for offset, size in table[first:last, 1:].tolist()
    ]
    base = int(table[first, 0])
    return np.concatenate(chunks)[start - base : stop - base]
