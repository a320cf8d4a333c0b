"""Zstd shards: rows compressed in chunks, bytes of equal weight side by side, each chunk findable.

Smaller on disk than raw shards, and still readable by (layer, site, sample) chunk by chunk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from tpufleet.errors import BadInput
from tpufleet.workloads.activations import dtypes, shards, writing

# Activations are noise in their low bytes; higher levels cost time and win nothing.
LEVEL = 1
CHUNKS = ".chunks"  # the table of a tensor: first row, first byte, bytes


class ZstdShardWriter:
    """The same calls as `RawShardWriter`; tensors named in `fold` are compressed."""

    def __init__(
        self,
        draft: Path,
        name: str,
        tensors: Iterable[shards.Tensor],
        fold: Iterable[str],
        hands: writing.Hands | None = None,
    ):
        self._draft, self._name, self._hands = draft, name, hands or writing.Here()
        self._plain = {tensor.name: tensor for tensor in tensors}
        self._fold = frozenset(fold)
        self._parts = {name: draft.with_suffix(f".{i}") for i, name in enumerate(self._plain)}
        self._files = {name: open(path, "wb") for name, path in self._parts.items()}  # noqa: SIM115
        self._rows = dict.fromkeys(self._plain, 0)
        self._tables: dict[str, list[tuple[int, int, int]]] = {name: [] for name in self._fold}

    def append(self, name: str, *parts: np.ndarray) -> None:
        for rows in parts if len(parts) == 1 else [np.concatenate(parts)]:
            data = shards.as_bytes(rows, self._plain[name])
            if name not in self._fold:
                self._files[name].write(data)
            elif len(rows):
                self._compress(name, rows)
            self._rows[name] += len(rows)

    def _compress(self, name: str, rows: np.ndarray) -> None:
        """Chunks of some megabytes, each by whichever thread is free, stored in their order."""
        height = max(shards.PIECE // max(self._plain[name].row_bytes, 1), 1)
        starts = range(0, len(rows), height)
        jobs = [
            self._hands.submit(_fold_rows, rows[start : start + height], self._plain[name])
            for start in starts
        ]
        for start, job in zip(starts, jobs, strict=True):
            packed = job.result()
            place = (self._rows[name] + start, self._files[name].tell(), len(packed))
            self._tables[name].append(place)
            self._files[name].write(packed)

    def finish(self) -> shards.ShardFile:
        for name, tensor in self._plain.items():
            if self._rows[name] != tensor.shape[0]:
                raise BadInput(f"{name}: rows are missing; the shard is not whole")
        sizes = {name: file.tell() for name, file in self._files.items()}
        for file in self._files.values():
            file.close()
        tables = {
            name + CHUNKS: np.array(rows, np.int64).reshape(-1, 3)
            for name, rows in self._tables.items()
        }
        tensors = [
            replace(tensor, dtype="U8", shape=(sizes[name],)) if name in self._fold else tensor
            for name, tensor in self._plain.items()
        ]
        tensors += [
            shards.Tensor(name=name, dtype="I64", shape=table.shape)
            for name, table in tables.items()
        ]
        writer = writing.RawShardWriter(self._draft, self._name, tensors, self._hands)
        for tensor in tensors:
            if tensor.name in tables:
                writer.append(tensor.name, tables[tensor.name])
            else:
                _copy(self._parts[tensor.name], writer, tensor)
        self._discard()
        unfolded = {name: (self._plain[name].dtype, self._plain[name].shape) for name in self._fold}
        return replace(writer.finish(), unfolded=unfolded)

    def abandon(self) -> None:
        for file in self._files.values():
            file.close()
        self._discard()
        self._draft.unlink(missing_ok=True)

    def _discard(self) -> None:
        for path in self._parts.values():
            path.unlink(missing_ok=True)


def _fold_rows(rows: np.ndarray, tensor: shards.Tensor) -> bytes:
    return fold(shards.as_bytes(rows, tensor), rows.dtype.itemsize)


def fold(data: memoryview, itemsize: int) -> bytes:
    import zstandard  # only those who compress need it

    planes = np.frombuffer(data, np.uint8).reshape(-1, itemsize).T
    return zstandard.ZstdCompressor(level=LEVEL).compress(np.ascontiguousarray(planes).tobytes())


def unfold(data: bytes, dtype: str, row_shape: tuple[int, ...]) -> np.ndarray:
    import zstandard

    kind = dtypes.NUMPY[dtype]
    planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint8)
    flat = np.ascontiguousarray(planes.reshape(kind.itemsize, -1).T).reshape(-1)
    return flat.view(kind).reshape(-1, *row_shape)


def rows_of(
    shard: shards.ShardFile,
    name: str,
    start: int,
    stop: int,
    read: Callable[[str, int, int], bytes],
) -> np.ndarray:
    """Rows start … stop of a compressed tensor. `read(tensor, offset, size)` fetches its bytes."""
    dtype, shape = shard.unfolded[name]
    table_at = shard.tensors[name + CHUNKS]
    table = np.frombuffer(read(name + CHUNKS, 0, table_at.nbytes), np.int64).reshape(-1, 3)
    first = max(int(np.searchsorted(table[:, 0], start, "right")) - 1, 0)
    last = int(np.searchsorted(table[:, 0], stop, "left"))
    if start >= stop:
        return np.empty((0, *shape[1:]), dtypes.NUMPY[dtype])
    chunks = [
        unfold(read(name, int(offset), int(size)), dtype, shape[1:])
        for _, offset, size in table[first:last]
    ]
    base = int(table[first, 0])
    return np.concatenate(chunks)[start - base : stop - base]


def _copy(path: Path, writer: writing.RawShardWriter, tensor: shards.Tensor) -> None:
    """Stream a part file into its place in the shard, some megabytes at a time."""
    kind = dtypes.NUMPY[tensor.dtype]
    rows = max((16 << 20) // max(tensor.row_bytes, 1), 1)
    with open(path, "rb", buffering=0) as file:
        while data := file.read(rows * max(tensor.row_bytes, 1)):
            writer.append(tensor.name, np.frombuffer(data, kind).reshape(-1, *tensor.shape[1:]))
    os.truncate(path, 0)
