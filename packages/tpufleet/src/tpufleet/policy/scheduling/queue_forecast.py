"""When queued jobs of a pool start, as far as time limits, reservations, quotas and budgets tell,
and which job each is behind."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType

import msgspec

from tpufleet.model.job.jobs import JobId
from tpufleet.policy.scheduling.placement import UNLIMITED_COUNTS_AS, Occupant


class QueuedDemand(msgspec.Struct, frozen=True, kw_only=True):
    job_id: JobId
    slices: int  # that it lacks
    runs_for: timedelta | None = None  # its time limit
    owner: str = ""
    not_before: datetime | None = None


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Slices that are kept for the jobs of one user, beyond those that they hold."""

    owner: str
    slices: int
    starts_at: datetime
    ends_at: datetime


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """`starts_at` is the latest moment; None while that is unknown."""

    job_id: JobId
    starts_at: datetime | None
    behind: JobId | None = None  # the job whose end it waits for
    until: datetime | None = None  # when that job ends at the latest


def forecast_queue(
    queue: Sequence[QueuedDemand],
    available: int,
    occupants: Sequence[Occupant],
    now: datetime,
    claims: Sequence[Claim] = (),
    room: Mapping[str, int] = MappingProxyType({}),
) -> list[Forecast]:
    """In the order of the queue, without backfill: each job starts after the one before it. `room`:
    how many more slices the quotas of users allow, of those who have one."""
    quotas = _Quotas(room, occupants)
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
        starts_at = quotas.start(demand, _after_claims(demand, moment, available, claims))
        forecasts.append(
            Forecast(job_id=demand.job_id, starts_at=starts_at, behind=behind, until=until)
        )
        if starts_at is None:
            continue  # it does not block the queue
        available -= demand.slices
        if demand.runs_for is not None:
            ends_at = starts_at + demand.runs_for
            entry = (ends_at, len(occupants) + index, demand.slices, demand.job_id)
            heapq.heappush(ends, entry)
        else:
            endless.append(demand.job_id)
    return forecasts


def _after_claims(
    demand: QueuedDemand, moment: datetime, available: int, claims: Sequence[Claim]
) -> datetime:
    """When they leave enough for as long as the job runs; as placement decides."""
    start = max(moment, demand.not_before or moment)
    length = demand.runs_for or UNLIMITED_COUNTS_AS
    while True:
        kept = [
            claim
            for claim in claims
            if claim.owner != demand.owner
            and claim.starts_at < start + length
            and start < claim.ends_at
        ]
        if not kept or demand.slices <= available - sum(claim.slices for claim in kept):
            return start
        start = min(claim.ends_at for claim in kept)


class _Quotas:
    """How many more slices each user may hold, as their jobs start and end."""

    def __init__(self, room: Mapping[str, int], occupants: Sequence[Occupant]) -> None:
        self._room = dict(room)
        self._ends: dict[str, list[tuple[datetime, int]]] = {}
        for each in occupants:
            if each.owner in self._room and each.ends_by is not None:
                heapq.heappush(self._ends.setdefault(each.owner, []), (each.ends_by, each.slices))

    def start(self, demand: QueuedDemand, moment: datetime) -> datetime | None:
        """From this moment on; None while it is unknown when jobs of its owner end."""
        if demand.owner not in self._room:
            return moment
        ends = self._ends.setdefault(demand.owner, [])
        while self._room[demand.owner] < demand.slices:
            if not ends:
                return None
            ended, slices = heapq.heappop(ends)
            self._room[demand.owner] += slices
            moment = max(moment, ended)
        self._room[demand.owner] -= demand.slices
        if demand.runs_for is not None:
            heapq.heappush(ends, (moment + demand.runs_for, demand.slices))
        return moment
