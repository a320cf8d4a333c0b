"""Whose were the chip hours, and which were lost? Worked out from slices and attempts alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpufleet.model import topology
from tpufleet.model.attempts import Attempt
from tpufleet.model.costs import CostRow, StockRow
from tpufleet.model.end_reasons import EndReason
from tpufleet.model.jobs import Capacity, Job, JobId
from tpufleet.model.pools import CapacityRefusal
from tpufleet.model.slices import LossReason, SliceId, TpuSlice

HOUR = timedelta(hours=1)
# With a notice, machines run on (and are paid for) until they are really taken.
_RUNS_ON = (LossReason.PREEMPTED, LossReason.MAINTENANCE)


@dataclass(slots=True)
class _Sum:
    slices: set[SliceId]
    paid: timedelta = timedelta(0)  # all in chips × time
    running: timedelta = timedelta(0)
    lost: timedelta = timedelta(0)


def paid_span(tpu_slice: TpuSlice, now: datetime) -> tuple[datetime, datetime] | None:
    """From its machines' start until we let go of it, or it was taken. None: never paid for."""
    known = [moment for moment in (tpu_slice.up_at, tpu_slice.ready_at) if moment is not None]
    if not known:
        return None
    begun = min(known)
    end = tpu_slice.lost_at
    if end is not None and tpu_slice.loss in _RUNS_ON and tpu_slice.gone_at is not None:
        end = tpu_slice.gone_at
    return begun, max(begun, end or tpu_slice.gone_at or now)


def account(
    slices: Iterable[TpuSlice],
    jobs: Mapping[JobId, Job],
    attempts: Iterable[Attempt],
    now: datetime,
) -> list[CostRow]:
    """Every paid chip hour exactly once, dearest first."""
    on_slice: dict[SliceId, list[Attempt]] = {}
    for attempt in attempts:
        for slice_id in attempt.slices:
            on_slice.setdefault(slice_id, []).append(attempt)
    sums: dict[tuple[JobId | None, str | None, str, Capacity], _Sum] = {}
    for tpu_slice in slices:
        span = paid_span(tpu_slice, now)
        if span is not None:
            _share(tpu_slice, span, on_slice.get(tpu_slice.id, ()), sums, now)
    rows = [_row(key, found, jobs) for key, found in sums.items()]
    return sorted(rows, key=lambda row: -row.chip_hours)


def _share(
    tpu_slice: TpuSlice,
    span: tuple[datetime, datetime],
    attempts: Sequence[Attempt],
    sums: dict[tuple[JobId | None, str | None, str, Capacity], _Sum],
    now: datetime,
) -> None:
    chips = topology.find(tpu_slice.accelerator).chips

    def of(job_id: JobId | None) -> _Sum:
        key = (job_id, tpu_slice.pool, tpu_slice.accelerator, tpu_slice.capacity)
        found = sums.setdefault(key, _Sum(set()))
        found.slices.add(tpu_slice.id)
        return found

    left = span[1] - span[0]
    for attempt in attempts:
        held = _overlap(span, attempt.created_at, attempt.ended_at or now)
        used = of(attempt.job_id)
        used.paid += chips * held
        left -= held
        if attempt.running_at is not None:
            ran = _overlap(span, attempt.running_at, attempt.ended_at or now)
            used.running += chips * ran
            used.lost += chips * ran * lost_share(attempt)
    # Booting, or waiting for the rest of a gang, is for the job; the rest nobody used.
    of(tpu_slice.job_id).paid += chips * max(left, timedelta(0))


def lost_share(attempt: Attempt) -> float:
    """Of the work of an attempt that has ended: how much was after its last checkpoint."""
    if attempt.live or attempt.last_step is None or attempt.end_reason is EndReason.FINISHED:
        return 0.0
    begun = attempt.start_step or 0
    kept = max(attempt.checkpoint_step or begun, begun)
    done = attempt.last_step - begun
    return min(1.0, max(0.0, (attempt.last_step - kept) / done)) if done > 0 else 0.0


def stock(slices: Iterable[TpuSlice], refusals: Iterable[CapacityRefusal]) -> list[StockRow]:
    """What was granted and refused where, and when."""
    places: dict[tuple[str, str, str, Capacity], list[TpuSlice]] = {}
    for found in slices:
        key = (found.provider, found.zone, found.accelerator, found.capacity)
        places.setdefault(key, []).append(found)
    said = {(no.provider, no.zone, no.accelerator, no.capacity): no for no in refusals}
    rows = []
    for key in sorted({*places, *said}):
        of_place, refusal = places.get(key, []), said.get(key)
        granted = [found.up_at or found.ready_at for found in of_place]
        moments = [moment for moment in granted if moment is not None]
        waiting = refusal is not None and refusal.streak > 0
        rows.append(
            StockRow(
                provider=key[0],
                zone=key[1],
                accelerator=key[2],
                capacity=key[3],
                granted=len(moments),
                refused=sum(found.loss is LossReason.REFUSED for found in of_place),
                preempted=sum(found.loss is LossReason.PREEMPTED for found in of_place),
                last_granted=max(moments, default=None),
                last_refused=refusal.refused_at if refusal is not None else None,
                not_before=refusal.until if refusal is not None and waiting else None,
                message=refusal.message if refusal is not None else "",
            )
        )
    return rows


def _overlap(span: tuple[datetime, datetime], begin: datetime, end: datetime) -> timedelta:
    return max(min(span[1], end) - max(span[0], begin), timedelta(0))


def _row(
    key: tuple[JobId | None, str | None, str, Capacity], found: _Sum, jobs: Mapping[JobId, Job]
) -> CostRow:
    job = jobs.get(key[0]) if key[0] is not None else None
    return CostRow(
        job_id=key[0],
        job_name=job.spec.name if job is not None else "",
        owner=job.owner if job is not None else "",
        pool=key[1],
        accelerator=key[2],
        capacity=key[3],
        slices=len(found.slices),
        chip_hours=found.paid / HOUR,
        running=found.running / HOUR,
        lost=found.lost / HOUR,
    )
