"""Metrics of jobs as event files, which TensorBoard reads. Neither TensorBoard nor TensorFlow is
needed to write them.

The format: records of https://www.tensorflow.org/tutorials/load_data/tfrecord, each an `Event` of
tensorboard/compat/proto/event.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from tpufleet.model.job.metric_points import MetricPoint

FILE_VERSION = b"brain.Event:2"
FILE_NAME = "events.out.tfevents.{seconds}.tpufleet"


class EventFile:
    """The metrics of one job, appended as they come."""

    def __init__(self, folder: Path, start: datetime) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE_NAME.format(seconds=int(start.timestamp()))
        self._last: datetime | None = None
        self.path.write_bytes(_record(_double(1, start.timestamp()) + _bytes(3, FILE_VERSION)))

    def append(self, points: Iterable[MetricPoint]) -> int:
        """Those that are newer than what was appended before; how many."""
        new = [point for point in points if self._last is None or point.at > self._last]
        with self.path.open("ab") as file:
            for number, point in enumerate(new):
                file.write(_record(_event(point, number)))
                self._last = point.at
        return len(new)


def _event(point: MetricPoint, number: int) -> bytes:
    step = number if point.step is None else point.step
    values = b"".join(
        _bytes(1, _bytes(1, name.encode()) + _tag(2, 5) + struct.pack("<f", value))
        for name, value in point.values.items()
    )
    return _double(1, point.at.timestamp()) + _tag(2, 0) + _varint(step) + _bytes(5, values)


# Protocol buffers: https://protobuf.dev/programming-guides/encoding/


def _tag(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _varint(number: int) -> bytes:
    number &= 2**64 - 1  # negative numbers as two's complement
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _double(field: int, value: float) -> bytes:
    return _tag(field, 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _tag(field, 2) + _varint(len(value)) + value


# TFRecord: length, masked CRC of the length, data, masked CRC of the data.


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc_table() -> list[int]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)  # Castagnoli
        table.append(crc)
    return table


_CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF
