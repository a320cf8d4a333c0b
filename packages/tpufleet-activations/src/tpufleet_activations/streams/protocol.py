"""What an extractor and a reader say to each other: frames of a message and, for rows, raw tensors.

The reader asks for units, and the extractor sends the rows of each, in order. The extractor keeps
no position: after a restart of either side the reader asks for the rows that it lacks.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tpufleet_activations.io import dtypes

VERSION = 1
MOST_HEADER, MOST_FIRST_HEADER = 64 << 20, 64 << 10
MOST_ROW_BYTES = 1 << 30
# Rows are sent in frames of about this size. In shared memory a slot holds one.
FRAME_BYTES = 8 << 20
# Units that a reader has asked for at a time, so that several can share batches.
WINDOW = 4
# A peer whose machine is gone is noticed within about this time.
PEER_LOST_SECONDS = 60
_HEADER = struct.Struct("<II")
_MAGIC = 0x74665331


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of a reader."""

    version: int
    token: str
    sites: tuple[str, ...]
    rank: int
    world_size: int
    shared_memory: bool = False


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    plan: bytes
    slots: int = 0  # of shared memory, whose descriptor comes with this message
    slot_bytes: int = 0


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    reason: str
    unauthorized: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rows of a unit from `row` on."""

    unit: int
    row: int


class Rows(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rows `row` … `row + count` of a unit. The bytes of the tensors follow, in this order, or are
    in a slot of the shared memory."""

    unit: int
    row: int
    count: int
    tensors: tuple[tuple[str, str, int], ...]  # name, dtype, width; 0: one number for each row
    slot: int = -1

    @property
    def size(self) -> int:
        return sum(size for _, size in self.layout())

    def layout(self) -> list[tuple[np.dtype, int]]:
        """The dtype of each tensor, and its bytes."""
        kinds = [(dtypes.NUMPY_DTYPES[dtype], width) for _, dtype, width in self.tensors]
        return [(kind, self.count * kind.itemsize * max(width, 1)) for kind, width in kinds]

    def unpack(self, data: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors in `data`, without copying."""
        tensors, at = {}, 0
        for (name, _, width), (kind, size) in zip(self.tensors, self.layout(), strict=True):
            values = data[at : at + size].view(kind)
            tensors[name] = values.reshape(self.count, width) if width else values
            at += size
        return tensors


class UnitEnd(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    unit: int
    rows: int


class Free(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reader has copied a slot."""

    slot: int


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reader has all rows that it wants."""


Message = Hello | Welcome | Refused | Request | Rows | UnitEnd | Free | Done
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class BrokenFrame(ConnectionError):
    """The other side is no extractor or reader, or of another version."""

    def __init__(self, evidence: object):
        super().__init__(f"not what a stream of activations sends: {evidence}"[:500])


class Closed(ConnectionResetError):
    """By the other side, perhaps in the middle of a frame."""

    def __init__(self) -> None:
        super().__init__("the connection was closed")


class Received(NamedTuple):
    message: Message
    data: np.ndarray | None  # the tensors of Rows that are not in a slot


def send(connection: socket.socket, message: Message, views: Sequence[memoryview] = ()) -> None:
    body = msgspec.msgpack.encode(message)
    connection.sendall(_HEADER.pack(_MAGIC, len(body)) + body)
    for view in views:
        connection.sendall(view)


def receive(connection: socket.socket, most: int = MOST_HEADER) -> Received:
    """The next message. Raises Closed or BrokenFrame."""
    magic, size = _HEADER.unpack(_read(connection, _HEADER.size))
    if magic != _MAGIC or size > most:
        raise BrokenFrame((magic, size))
    try:
        message = _decoder.decode(_read(connection, size))
    except msgspec.DecodeError as error:
        raise BrokenFrame(error) from error
    if not isinstance(message, Rows):
        return Received(message, None)
    widths = [width for _, _, width in message.tensors]
    known = all(dtype in dtypes.NUMPY_DTYPES for _, dtype, _ in message.tensors)
    if min([message.count, *widths], default=0) < 0 or not known or message.size > MOST_ROW_BYTES:
        raise BrokenFrame(message)
    if message.slot >= 0:
        return Received(message, None)
    data = np.empty(message.size, np.uint8)
    _read_into(connection, data.data)
    return Received(message, data)


def rows_per_frame(row_bytes: int) -> int:
    return max(FRAME_BYTES // max(row_bytes, 1), 1)


def slot_bytes(row_bytes: int) -> int:
    """So that a slot holds a frame; whole pages."""
    return math.ceil(max(FRAME_BYTES, row_bytes) / 4096) * 4096


def keep_alive(connection: socket.socket) -> None:
    """Notice a machine that is gone, however long the other side pauses."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", PEER_LOST_SECONDS // 3),
        ("TCP_KEEPINTVL", PEER_LOST_SECONDS // 6),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", 1000 * PEER_LOST_SECONDS),
    ):
        option: Any = getattr(socket, name, None)  # not on every system
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def shut_down(connection: socket.socket) -> None:
    """Wakes up a thread that uses it. TLS is left as it is: what that thread sends stays secret."""
    with suppress(OSError):  # already closed
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _read_into(connection, memoryview(data))
    return bytes(data)


def _read_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        done = connection.recv_into(view)
        if not done:
            raise Closed
        view = view[done:]
