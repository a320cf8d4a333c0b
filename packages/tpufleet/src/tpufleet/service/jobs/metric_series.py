"""Metrics of jobs over time: gathered from heartbeats, kept after the end."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from msgspec.structs import replace

from tpufleet.model.api_types import MetricSeries
from tpufleet.model.fleet.agent_protocol import Assignment
from tpufleet.model.fleet.hosts import Progress, ProgressPoint
from tpufleet.model.job.attempts import Attempt, AttemptId
from tpufleet.model.job.jobs import Job, JobId
from tpufleet.model.job.metric_points import MAX_METRICS, MAX_POINTS, MetricPoint, surplus_points
from tpufleet.stores.base import Store

# All of the first points of a job, as many as are kept; then one in this time. The last one is in
# its attempt.
FIRST_POINTS = MAX_POINTS
MIN_INTERVAL = timedelta(seconds=2)
_CHECK_EVERY = 50  # points of a job that this server wrote
_MAX_REMEMBERED = 20_000  # jobs


@dataclass(slots=True)
class _Gathered:
    last_at: datetime
    last: tuple[int | None, dict[str, float]]
    written: int = 0

    def is_due(self, at: datetime, content: tuple[int | None, dict[str, float]]) -> bool:
        if self.last == content:
            return False
        return self.written < FIRST_POINTS or abs(at - self.last_at) >= MIN_INTERVAL


class MetricRecorder:
    """Gathers points from heartbeats, and writes them together."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._jobs: dict[JobId, _Gathered] = {}
        self._points: list[MetricPoint] = []
        # Of each job: its attempt, and the time of the last point by the clock of the host. None
        # while its agent has sent no points.
        self._newest_sent: dict[JobId, tuple[AttemptId, datetime | None]] = {}

    def new_points(
        self,
        assignment: Assignment,
        points: Sequence[ProgressPoint],
        times_sent: Sequence[datetime],
    ) -> Sequence[ProgressPoint]:
        """Without those that an earlier heartbeat brought: two may be under way at once, and one
        whose response was lost is repeated. `times_sent`: by the clock of the host."""
        with self._lock:
            if len(self._newest_sent) >= _MAX_REMEMBERED:
                self._newest_sent.clear()
            attempt_id, newest = self._newest_sent.get(assignment.job_id, (None, None))
            if attempt_id != assignment.attempt_id:
                newest = None
            new = sum(newest is None or at > newest for at in times_sent)
            if times_sent:
                newest = max([*times_sent, *([newest] if newest else [])])
            self._newest_sent[assignment.job_id] = (assignment.attempt_id, newest)
        return points[-new:] if new else ()

    def report(
        self,
        job_id: JobId,
        progress: Progress | None,
        now: datetime,
        points: Sequence[ProgressPoint] = (),
    ) -> None:
        """What process 0 of a job reports: the latest, and all since its last heartbeat where the
        agent gathers them. Cheap; may be called for every heartbeat."""
        _, sent = self._newest_sent.get(job_id, (None, None))
        if not points and progress is not None and sent is None:
            points = [
                ProgressPoint(at=progress.at or now, step=progress.step, metrics=progress.metrics)
            ]
        for point in points:
            if point.metrics or point.step is not None:
                self._add(job_id, point)

    def _add(self, job_id: JobId, point: ProgressPoint) -> None:
        finite = {
            name: value for name, value in (point.metrics or {}).items() if math.isfinite(value)
        }
        values = dict(list(finite.items())[:MAX_METRICS])
        content = (point.step, values)
        with self._lock:
            known = self._jobs.get(job_id)
            if known is not None and not known.is_due(point.at, content):
                return
            if known is None:
                if len(self._jobs) >= _MAX_REMEMBERED:
                    self._jobs.clear()
                known = self._jobs[job_id] = _Gathered(point.at, content)
            known.last_at, known.last = point.at, content
            known.written += 1
            self._points.append(
                MetricPoint(job_id=job_id, at=point.at, step=point.step, values=values)
            )

    @property
    def pending(self) -> bool:
        return bool(self._points)

    def flush(self) -> None:
        """Write the points gathered since the last flush. In a worker thread."""
        with self._lock:
            points, self._points = self._points, []
            full = {
                point.job_id
                for point in points
                if (known := self._jobs.get(point.job_id)) and known.written % _CHECK_EVERY == 0
            }
        if not points:
            return
        try:
            self._store.record_metrics(points)
        except Exception:
            with self._lock:
                self._points = points + self._points
            raise
        for job_id in full:
            self._store.delete_metric_points(surplus_points(self._store.metric_points(job_id)))


def series(store: Store, job: Job) -> MetricSeries:
    points, attempts = store.metric_points(job.id), store.attempts(job.id)
    last = [point for attempt in attempts if (point := _last_point(attempt))]
    points += [point for point in last if not _is_recorded(point, points)]
    points.sort(key=lambda each: each.at)
    return MetricSeries(
        job_id=job.id, name=job.spec.name, points=tuple(each_step_once(points, attempts))
    )


def each_step_once(points: Sequence[MetricPoint], attempts: Sequence[Attempt]) -> list[MetricPoint]:
    """An attempt that starts from a checkpoint repeats steps: its own points replace those that
    earlier attempts left of them. Points are in order of time, and stay so."""
    kept: list[MetricPoint] = []
    starts = [attempt.created_at for attempt in attempts[1:]]
    for start, end in pairwise([None, *starts, None]):
        of_attempt = [
            point
            for point in points
            if (start is None or point.at >= start) and (end is None or point.at < end)
        ]
        first = next((point.step for point in of_attempt if point.step is not None), None)
        if first is not None:
            kept = _without_repeated(kept, first)
        for point in of_attempt:
            if kept and point.step is not None and kept[-1].step == point.step:
                point = replace(point, values=kept.pop().values | point.values)
            kept.append(point)
    return kept


def _without_repeated(points: list[MetricPoint], first: int) -> list[MetricPoint]:
    """Back to this step, but not across a step that is larger than the next one: such a program
    counts anew in each epoch."""
    cut, newest = len(points), None
    for index in reversed(range(len(points))):
        step = points[index].step
        if step is None:
            continue
        if step < first or (newest is not None and step > newest):
            break
        cut, newest = index, step
    return points[:cut] + [point for point in points[cut:] if point.step is None]


def _is_recorded(last: MetricPoint, points: Sequence[MetricPoint]) -> bool:
    """The times of one report differ by what its heartbeats took, and `last` also has the latest
    values of metrics that are reported more rarely."""
    return any(
        point.at == last.at
        or (point.step == last.step and point.values.items() <= last.values.items())
        for point in points
    )


def _last_point(attempt: Attempt) -> MetricPoint | None:
    """What an ended attempt reported last."""
    at = attempt.progress_at or attempt.ended_at
    if at is None or not (attempt.metrics or attempt.last_step is not None):
        return None
    return MetricPoint(
        job_id=attempt.job_id, at=at, step=attempt.last_step, values=attempt.metrics or {}
    )
