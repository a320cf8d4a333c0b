"""The format of shard files: raw tensors in the safetensors layout, with digests.

Sizes are known before the first activation is computed, so the header is written first and rows go
to their final offsets as they arrive. A zstd shard stores tensors as compressed chunks and tables.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from tpufleet.errors import BadInput
from tpufleet_activations.io import dtypes

FORMAT = "tpufleet-activations-1"
# A tensor's digest combines the digests of its pieces, so that threads can share the work.
PIECE = 4 << 20
# Direct writes have to be aligned so: the largest block of disks and the page of most machines.
DIRECT_BLOCK = 4096

# Names of the tensors of a shard besides those of the sites.
SAMPLE_INDEX, SAMPLE_ROWS = "sample_index", "sample_rows"
TOKENS, POSITIONS, METADATA = "tokens", "positions", "samples.json"


FOLDER = "shards/"
_NAME = re.compile(r"shards/(\d{8,})-(\d{4,})-(\d{3,})(?:-(\d{4,}))?\.safetensors")


class ShardName(NamedTuple):
    """The name of a shard. It has the claim's token, so a fenced worker never touches its
    successor's file."""

    unit: int
    token: int
    part: int  # the process of a gang
    number: int | None = None  # None: the only file of the unit and part

    def __str__(self) -> str:
        number = "" if self.number is None else f"-{self.number:04d}"
        return f"{FOLDER}{self.unit:08d}-{self.token:04d}-{self.part:03d}{number}.safetensors"


def parse_name(name: str) -> ShardName | None:
    """None for a file that no writer of a dataset has named."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    numbers = [None if digits is None else int(digits) for digits in match.groups()]
    parsed = ShardName(*numbers)  # type: ignore[arg-type]  # only the last one is optional
    return parsed if str(parsed) == name else None


class Tensor(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A tensor's location in a shard, and the digest of its bytes once written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0  # from the start of the file
    digest: str = ""

    @property
    def nbytes(self) -> int:
        return dtypes.NUMPY_DTYPES[self.dtype].itemsize * math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        row = dtypes.NUMPY_DTYPES[self.dtype].itemsize * math.prod(self.shape[1:])
        return row if self.shape[0] else 0


class ShardFile(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a shard in a commit record; enough to read it without its header."""

    name: str
    size: int
    header_size: int
    header_sha256: str
    tensors: Mapping[str, Tensor]
    # In a zstd shard: dtype and shape of each compressed tensor once decompressed.
    uncompressed: Mapping[str, tuple[str, tuple[int, ...]]] = msgspec.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> ShardFile:
        return msgspec.convert(body, cls)


def build_header(tensors: Iterable[Tensor], **metadata: str) -> tuple[bytes, list[Tensor]]:
    """The header and the tensors with their offsets; wide types first, for alignment. The header is
    padded so that the first large tensor starts a block, and can be written from where it is."""
    ordered = sorted(tensors, key=lambda tensor: -dtypes.NUMPY_DTYPES[tensor.dtype].itemsize)
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
    large = next((tensor.name for tensor in ordered if tensor.nbytes >= PIECE), None)
    before = body[large]["data_offsets"][0] if large else 0
    if large and before % 8 == 0:
        text += b" " * (-(len(text) + 8 + before) % DIRECT_BLOCK)
    header = struct.pack("<Q", len(text)) + text
    placed, start = [], len(header)
    for tensor in ordered:
        placed.append(replace(tensor, offset=start))
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
    wanted = dtypes.NUMPY_DTYPES[tensor.dtype]
    if rows.dtype != wanted or rows.shape[1:] != tensor.shape[1:]:
        raise BadInput(
            f"{tensor.name}: rows are {rows.dtype}{list(rows.shape[1:])}, "
            f"expected {wanted}{list(tensor.shape[1:])}"
        )
    flat = np.ascontiguousarray(rows).reshape(-1)
    return flat.view(np.uint8).data


def wrong_rows(name: str, expected: int) -> BadInput:
    return BadInput(f"{name}: other than the expected {expected} rows")


def describe_file(name: str, size: int, header: bytes, tensors: Iterable[Tensor]) -> ShardFile:
    return ShardFile(
        name=name,
        size=size,
        header_size=len(header),
        header_sha256=hashlib.sha256(header).hexdigest(),
        tensors={tensor.name: tensor for tensor in tensors},
    )


def with_digest(tensor: Tensor, pieces: Iterable[bytes]) -> Tensor:
    """The tensor with its digest: SHA-256 of the BLAKE3 digests of its pieces, in order."""
    return replace(tensor, digest=hashlib.sha256(b"".join(pieces)).hexdigest())
