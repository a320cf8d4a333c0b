"""When queued jobs of a pool start, as far as time limits tell, and which job each is behind."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from tpufleet.model.job.jobs import JobId
from tpufleet.policy.scheduling.placement import Occupant


class QueuedDemand(msgspec.Struct, frozen=True, kw_only=True):
    job_id: JobId
    slices: int  # that it lacks
    runs_for: timedelta | None = None  # its time limit


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """`starts_at` is the latest moment; None while that is unknown."""

    job_id: JobId
    starts_at: datetime | None
    behind: JobId | None = None  # the job whose end it waits for
    until: datetime | None = None  # when that job ends at the latest


def forecast_queue(
    queue: Sequence[QueuedDemand], available: int, occupants: Sequence[Occupant], now: datetime
) -> list[Forecast]:
    """In the order of the queue, without backfill: each job starts after the one before it."""
    ends = [
        (each.ends_by, index, each.slices, each.job_id)
        for index, each in enumerate(occupants)
        if each.ends_by is not None
    ]
    heapq.heapify(ends)
    endless = [each.job_id for each in occupants if each.ends_by is None]
    moment: datetime | None = now  # the start of the job before; None: unknown
    forecasts: list[Forecast] = []
    for index, demand in enumerate(queue):
        behind: JobId | None = None
        until: datetime | None = None
        while moment is not None and available < demand.slices:
            if not ends:
                moment = None
                break
            until, _, freed, behind = heapq.heappop(ends)
            moment = max(moment, until)
            available += freed
        if moment is None:
            ahead = queue[index - 1].job_id if index else None
            blocker = endless[0] if endless and not index else ahead
            forecasts.append(Forecast(job_id=demand.job_id, starts_at=None, behind=blocker))
            continue
        forecasts.append(
            Forecast(job_id=demand.job_id, starts_at=moment, behind=behind, until=until)
        )
        available -= demand.slices
        if demand.runs_for is not None:
            entry = (moment + demand.runs_for, len(occupants) + index, demand.slices, demand.job_id)
            heapq.heappush(ends, entry)
        else:
            endless.append(demand.job_id)
    return forecasts
