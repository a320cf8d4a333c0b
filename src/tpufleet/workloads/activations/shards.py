"""One shard file: raw tensors in the safetensors layout, written front to back with digests.

Sizes are known before the first activation is computed, so the header comes first and rows are
written in place as they arrive. A zstd shard holds each tensor as compressed chunks plus a table.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tpufleet.errors import BadInput
from tpufleet.workloads.activations import dtypes

FORMAT = "tpufleet-activations-1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor's place in a shard, and the digest of its bytes once written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0  # from the start of the file
    sha256: str = ""

    @property
    def nbytes(self) -> int:
        return dtypes.NUMPY[self.dtype].itemsize * int(np.prod(self.shape, dtype=np.int64))

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.shape[0] if self.shape[0] else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """All that a commit record says about a shard, enough to read it without its header."""

    name: str
    size: int
    header_size: int
    header_sha256: str
    tensors: Mapping[str, Tensor]
    # Of a zstd shard: the type and shape that each compressed tensor unfolds to.
    unfolded: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "size": self.size,
            "header_size": self.header_size,
            "header_sha256": self.header_sha256,
            "unfolded": {
                name: [dtype, list(shape)] for name, (dtype, shape) in self.unfolded.items()
            },
            "tensors": {
                tensor.name: [tensor.dtype, list(tensor.shape), tensor.offset, tensor.sha256]
                for tensor in self.tensors.values()
            },
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> ShardFile:
        tensors = {
            name: Tensor(name=name, dtype=dtype, shape=tuple(shape), offset=offset, sha256=digest)
            for name, (dtype, shape, offset, digest) in body["tensors"].items()
        }
        unfolded = {
            name: (dtype, tuple(shape)) for name, (dtype, shape) in body["unfolded"].items()
        }
        return cls(**{**body, "tensors": tensors, "unfolded": unfolded})


class ShardWriter(Protocol):
    """Takes rows of each tensor in order; `finish` checks that all came."""

    def append(self, name: str, rows: np.ndarray) -> None: ...

    def finish(self) -> ShardFile: ...

    def abandon(self) -> None: ...


@dataclass
class _Stream:
    tensor: Tensor
    written: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    hashing: Future[None] | None = None


class RawShardWriter:
    """Writes rows to their final place. With a pool, hashing runs beside writing."""

    def __init__(
        self, draft: Path, name: str, tensors: Iterable[Tensor], pool: Executor | None = None
    ):
        self._draft, self._name, self._pool = draft, name, pool
        header, placed = lay_out(tensors)
        self._header = header
        self._streams = {tensor.name: _Stream(tensor) for tensor in placed}
        self._size = len(header) + sum(tensor.nbytes for tensor in placed)
        self._file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.ftruncate(self._file, self._size)
        write_at(self._file, header, 0)

    def append(self, name: str, rows: np.ndarray) -> None:
        stream = self._streams[name]
        data = as_bytes(rows, stream.tensor)
        if stream.written + len(data) > stream.tensor.nbytes:
            raise BadInput(f"{name}: more rows than the {stream.tensor.shape[0]} announced")
        if stream.hashing is not None:
            stream.hashing.result()
        if self._pool is not None:
            stream.hashing = self._pool.submit(stream.digest.update, data)
        else:
            stream.digest.update(data)
        write_at(self._file, data, stream.tensor.offset + stream.written)
        stream.written += len(data)

    def finish(self) -> ShardFile:
        for stream in self._streams.values():
            if stream.hashing is not None:
                stream.hashing.result()
            if stream.written != stream.tensor.nbytes:
                raise BadInput(f"{stream.tensor.name}: rows are missing; the shard is not whole")
        os.fsync(self._file)
        os.close(self._file)
        return described(
            self._name,
            self._size,
            self._header,
            (with_digest(s.tensor, s.digest.hexdigest()) for s in self._streams.values()),
        )

    def abandon(self) -> None:
        os.close(self._file)
        self._draft.unlink(missing_ok=True)


def lay_out(tensors: Iterable[Tensor], **metadata: str) -> tuple[bytes, list[Tensor]]:
    """The header's bytes and the tensors with their offsets, wide types first for alignment."""
    ordered = sorted(tensors, key=lambda tensor: -dtypes.NUMPY[tensor.dtype].itemsize)
    body: dict[str, Any] = {"__metadata__": {"format": FORMAT, **metadata}}
    position = 0
    for tensor in ordered:
        end = position + tensor.nbytes
        body[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(body, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    header = struct.pack("<Q", len(text)) + text
    placed, start = [], len(header)
    for tensor in ordered:
        placed.append(_at(tensor, start))
        start += tensor.nbytes
    return header, placed


def read_header(data: bytes) -> list[Tensor]:
    """The tensors of a safetensors file, from its first bytes."""
    length = struct.unpack("<Q", data[:8])[0]
    body = json.loads(data[8 : 8 + length])
    body.pop("__metadata__", None)
    return [
        Tensor(
            name=name,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=8 + length + entry["data_offsets"][0],
        )
        for name, entry in body.items()
    ]


def as_bytes(rows: np.ndarray, tensor: Tensor) -> memoryview:
    wanted = dtypes.NUMPY[tensor.dtype]
    if rows.dtype != wanted or rows.shape[1:] != tensor.shape[1:]:
        raise BadInput(
            f"{tensor.name}: rows are {rows.dtype}{list(rows.shape[1:])}, "
            f"announced as {wanted}{list(tensor.shape[1:])}"
        )
    flat = np.ascontiguousarray(rows).reshape(-1)
    return memoryview(flat.view(np.uint8))


def described(name: str, size: int, header: bytes, tensors: Iterable[Tensor]) -> ShardFile:
    return ShardFile(
        name=name,
        size=size,
        header_size=len(header),
        header_sha256=hashlib.sha256(header).hexdigest(),
        tensors={tensor.name: tensor for tensor in tensors},
    )


def _at(tensor: Tensor, offset: int) -> Tensor:
    return Tensor(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, offset=offset)


def with_digest(tensor: Tensor, digest: str) -> Tensor:
    return Tensor(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        offset=tensor.offset,
        sha256=digest,
    )


def write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done
