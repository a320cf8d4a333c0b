"""Metrics of jobs as event files, which TensorBoard reads, written with its own library."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from datetime import datetime
from itertools import takewhile
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
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.record_writer import RecordWriter
        self._event, self._session_log, self._writer = Event, SessionLog, RecordWriter
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE_NAME.format(seconds=int(start.timestamp()))
        self._last: datetime | None = None
        self._steps: list[tuple[int, datetime]] = []
        self.path.write_bytes(b"")
        self._write([Event(wall_time=start.timestamp(), file_version=FILE_VERSION)])

    def append(self, points: Sequence[MetricPoint]) -> int:
        """Those that are newer than what was appended before; how many. `points`: all of the job,
        without those that a later attempt has replaced."""
        left = {point.at for point in points}
        new = [point for point in points if self._last is None or point.at > self._last]
        events = []
        for number, point in enumerate(new):
            step = number if point.step is None else point.step
            if point.step is not None:
                if self._drop_replaced(step, left):  # TensorBoard then does the same
                    start = self._session_log(status=self._session_log.START)
                    wall_time = point.at.timestamp()
                    events.append(self._event(wall_time=wall_time, step=step, session_log=start))
                self._steps.append((step, point.at))
            event = self._event(wall_time=point.at.timestamp(), step=step)
            for name, value in point.values.items():
                event.summary.value.add(tag=name, simple_value=value)
            events.append(event)
            self._last = point.at
        self._write(events)
        return len(new)

    def _drop_replaced(self, step: int, left: Container[datetime]) -> bool:
        """Steps from this one on, if none of them is left. A program that counts anew in each
        epoch repeats steps too, but replaces none."""
        later = list(takewhile(lambda each: each[0] >= step, reversed(self._steps)))
        if not later or any(at in left for _, at in later):
            return False
        del self._steps[-len(later) :]
        return True

    def _write(self, events: Iterable[Any]) -> None:
        with self.path.open("ab") as file:
            writer = self._writer(file)
            for event in events:
                writer.write(event.SerializeToString())
