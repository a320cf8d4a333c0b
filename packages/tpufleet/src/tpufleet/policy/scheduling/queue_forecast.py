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
    """In the order of the queue, without backfill: a job that lacks slices blocks those behind it;
    one that waits for anything else does not, as in placement. `room`: how many more slices the
    quotas of users allow, of those who have one."""
    quotas = _Quotas(room)
    ends = [
        (each.ends_by, -1, each.slices, each.owner, each.job_id)
        for each in occupants
        if each.ends_by is not None
    ]
    heapq.heapify(ends)
    endless = [each.job_id for each in occupants if each.ends_by is None]
    # Indices of jobs: of those that may start, with the moment since when; and of those later.
    ready: list[tuple[int, datetime]] = []
    later = [(max(now, each.not_before or now), index) for index, each in enumerate(queue)]
    heapq.heapify(later)
    forecasts: dict[int, Forecast] = {}
    behind: JobId | None = None  # the job that ended last, and when
    until: datetime | None = None
    moment = now
    while later or ends:
        moment = max(moment, min(each[0][0] for each in (later, ends) if each))
        while ends and ends[0][0] <= moment:
            until, _, freed, owner, behind = heapq.heappop(ends)
            available += freed
            for index in quotas.release(owner, freed):
                heapq.heappush(ready, (index, moment))
        while later and later[0][0] <= moment:
            heapq.heappush(ready, (heapq.heappop(later)[1], moment))
        while ready:
            index, since = ready[0]
            demand = queue[index]
            opens = _after_claims(demand, moment, available, claims)
            if opens > moment:
                heapq.heappop(ready)
                heapq.heappush(later, (opens, index))
                continue
            if not quotas.allow(demand, index):
                heapq.heappop(ready)
                continue
            if demand.slices > available:
                break
            heapq.heappop(ready)
            waited = since < moment
            forecasts[index] = Forecast(
                job_id=demand.job_id,
                starts_at=moment,
                behind=behind if waited else None,
                until=until if waited else None,
            )
            available -= demand.slices
            for following in quotas.take(demand):
                heapq.heappush(ready, (following, moment))
            if demand.runs_for is None:
                endless.append(demand.job_id)
            else:
                ends_at = moment + demand.runs_for
                heapq.heappush(ends, (ends_at, index, demand.slices, demand.owner, demand.job_id))
    ahead = endless[-1] if endless else None
    for index, _ in sorted(ready):
        job_id = queue[index].job_id
        forecasts[index] = Forecast(job_id=job_id, starts_at=None, behind=ahead)
        ahead = job_id
    return [
        forecasts.get(index, Forecast(job_id=each.job_id, starts_at=None))
        for index, each in enumerate(queue)
    ]


def _after_claims(
    demand: QueuedDemand, moment: datetime, available: int, claims: Sequence[Claim]
) -> datetime:
    """When they leave enough for as long as the job runs, if there is enough without them."""
    if demand.slices > available:
        return moment
    start, length = moment, demand.runs_for or UNLIMITED_COUNTS_AS
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
    """How many more slices each user may hold, and the jobs that wait for it by their size: of a
    size, the first is tried alone."""

    def __init__(self, room: Mapping[str, int]) -> None:
        self._room = dict(room)
        self._waiting: dict[str, dict[int, list[int]]] = {}

    def allow(self, demand: QueuedDemand, index: int) -> bool:
        if self._room.get(demand.owner, demand.slices) >= demand.slices:
            return True
        sizes = self._waiting.setdefault(demand.owner, {})
        heapq.heappush(sizes.setdefault(demand.slices, []), index)
        return False

    def take(self, demand: QueuedDemand) -> list[int]:
        """The job that may be next, if any."""
        if demand.owner in self._room:
            self._room[demand.owner] -= demand.slices
        waiting = self._waiting.get(demand.owner, {}).get(demand.slices)
        return [heapq.heappop(waiting)] if waiting else []

    def release(self, owner: str, slices: int) -> list[int]:
        """Jobs that may be next."""
        if owner in self._room:
            self._room[owner] += slices
        sizes = self._waiting.get(owner, {})
        return [heapq.heappop(waiting) for waiting in sizes.values() if waiting]
