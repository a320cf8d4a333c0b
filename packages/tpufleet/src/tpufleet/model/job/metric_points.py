"""Metrics that a job reported over time. A series is bounded: it is thinned as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from tpufleet.model.job.jobs import JobId

MAX_POINTS = 500  # per job; more would not be visible in a plot
MAX_METRICS = 100  # names per point
MAX_SEARCHED_NAME = 200  # characters: an index of Postgres holds 2,704 bytes
STEP = "step"  # searched like a metric: `step>1000`


class MetricPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What process 0 reported at one moment."""

    job_id: JobId
    at: datetime
    step: int | None
    values: dict[str, float]


def searchable_values(step: int | None, values: dict[str, float] | None) -> dict[str, float]:
    """The latest values by name, without those that cannot be compared, and names that no index
    holds: programs of users choose both."""
    numbers = dict(values or {})
    if step is not None:
        numbers.setdefault(STEP, step)
    kept = [
        (name, value)
        for name, value in numbers.items()
        if abs(value) < float("inf") and len(name) <= MAX_SEARCHED_NAME and "\0" not in name
    ]
    return {name: float(value) for name, value in kept[:MAX_METRICS]}


def surplus_points(points: Sequence[MetricPoint]) -> list[MetricPoint]:
    """Points to drop from a series, oldest first, so that every second one is left. The first and
    the last are kept."""
    if len(points) <= MAX_POINTS:
        return []
    return list(points[1:-1:2])
