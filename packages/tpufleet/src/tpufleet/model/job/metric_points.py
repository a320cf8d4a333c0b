"""Metrics that a job reported over time. A series is bounded: it is thinned as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from tpufleet.model.job.jobs import JobId

MAX_POINTS = 500  # per job; more would not be visible in a plot
MAX_METRICS = 100  # names per point
STEP = "step"  # searched like a metric: `step>1000`


class MetricPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What process 0 reported at one moment."""

    job_id: JobId
    at: datetime
    step: int | None
    values: dict[str, float]


def searchable_values(step: int | None, values: dict[str, float] | None) -> dict[str, float]:
    """The latest values by name, without those that cannot be compared."""
    numbers = dict(values or {})
    if step is not None:
        numbers.setdefault(STEP, step)
    kept = [(name, value) for name, value in numbers.items() if abs(value) < float("inf")]
    return {name: float(value) for name, value in kept[:MAX_METRICS]}


def surplus_points(points: Sequence[MetricPoint]) -> list[MetricPoint]:
    """Points to drop from a series, oldest first, so that every second one is left. The first and
    the last are kept."""
    if len(points) <= MAX_POINTS:
        return []
    return list(points[1:-1:2])
