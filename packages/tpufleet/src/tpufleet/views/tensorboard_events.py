"""Metrics of jobs as event files, which TensorBoard reads, written with its own library."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from tpufleet.errors import optional_packages
from tpufleet.model.job.metric_points import MetricPoint

FILE_VERSION = "brain.Event:2"
FILE_NAME = "events.out.tfevents.{seconds}.tpufleet"


class EventFile:
    """The metrics of one job, appended as they come."""

    def __init__(self, folder: Path, start: datetime) -> None:
        with optional_packages("event files of TensorBoard", "tensorboard"):
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.summary.writer.record_writer import RecordWriter
        self._event, self._writer = Event, RecordWriter
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE_NAME.format(seconds=int(start.timestamp()))
        self._last: datetime | None = None
        self.path.write_bytes(b"")
        self._write([Event(wall_time=start.timestamp(), file_version=FILE_VERSION)])

    def append(self, points: Iterable[MetricPoint]) -> int:
        """Those that are newer than what was appended before; how many."""
        new = [point for point in points if self._last is None or point.at > self._last]
        events = []
        for number, point in enumerate(new):
            step = number if point.step is None else point.step
            event = self._event(wall_time=point.at.timestamp(), step=step)
            for name, value in point.values.items():
                event.summary.value.add(tag=name, simple_value=value)
            events.append(event)
            self._last = point.at
        self._write(events)
        return len(new)

    def _write(self, events: Iterable[Any]) -> None:
        with self.path.open("ab") as file:
            writer = self._writer(file)
            for event in events:
                writer.write(event.SerializeToString())
