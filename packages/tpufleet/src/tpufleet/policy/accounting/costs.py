"""Chip hours by job: paid, useful, and what the rest went into. From slices and attempts alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from tpufleet.model.fleet.pools import CapacityRefusal, RefusalKind
from tpufleet.model.fleet.slices import SIMULATED_PROVIDERS, LossReason, SliceId, TpuSlice
from tpufleet.model.job.attempts import Attempt, AttemptId
from tpufleet.model.job.jobs import Capacity, Job, JobId
from tpufleet.model.people.costs import Badput, CostRow, SettledCosts, StockRow
from tpufleet.model.tpu import type_lookup
from tpufleet.policy.accounting import goodput

HOUR = timedelta(hours=1)
# After a notice, machines keep running (and are billed) until they are deleted.
_BILLED_UNTIL_GONE = (LossReason.PREEMPTED, LossReason.MAINTENANCE)

# Job, pool, type, capacity, and whether it is simulated.
_Key = tuple[JobId | None, str | None, str, Capacity, bool]


@dataclass(slots=True)
class _Totals:
    slices: set[SliceId]
    paid: timedelta = timedelta(0)  # all in chips × time
    badput: dict[Badput, timedelta] = field(default_factory=dict)

    def add(self, time: timedelta, badput: Mapping[Badput, float]) -> None:
        self.paid += time
        for kind, share in badput.items():
            self.badput[kind] = self.badput.get(kind, timedelta(0)) + time * share


def paid_span(tpu_slice: TpuSlice, now: datetime) -> tuple[datetime, datetime] | None:
    """From the start of its machines until it was released or lost. None: never billed."""
    known = [moment for moment in (tpu_slice.up_at, tpu_slice.ready_at) if moment is not None]
    if not known:
        return None
    start = min(known)
    end = tpu_slice.lost_at
    if end is not None and tpu_slice.loss in _BILLED_UNTIL_GONE and tpu_slice.gone_at is not None:
        end = tpu_slice.gone_at
    return start, max(start, end or tpu_slice.gone_at or now)


def account(
    slices: Iterable[TpuSlice],
    jobs: Mapping[JobId, Job],
    attempts: Iterable[Attempt],
    now: datetime,
    reporting: Collection[AttemptId] = (),
    since: datetime | None = None,
    until: datetime | None = None,
) -> list[CostRow]:
    """Every billed chip hour exactly once, largest row first. `reporting`: live attempts that have
    reported a step. `since` and `until`: only what was billed between them."""
    on_slice: dict[SliceId, list[Attempt]] = {}
    attempts = list(attempts)
    by_number = {(attempt.job_id, attempt.number): attempt for attempt in attempts}
    all_spans: dict[AttemptId, list[goodput.Span]] = {}

    def spans_of(attempt: Attempt) -> list[goodput.Span]:
        if attempt.id not in all_spans:
            after = by_number.get((attempt.job_id, attempt.number + 1))
            reports = attempt.id in reporting
            all_spans[attempt.id] = goodput.spans(attempt, now, reporting=reports, after=after)
        return all_spans[attempt.id]

    for attempt in attempts:
        for slice_id in attempt.slices:
            on_slice.setdefault(slice_id, []).append(attempt)
    sums: dict[_Key, _Totals] = {}
    for tpu_slice in slices:
        span = paid_span(tpu_slice, now)
        if span is not None and (since is not None or until is not None):
            start, end = max(span[0], since or span[0]), min(span[1], until or span[1])
            span = (start, end) if start < end else None
        if span is not None:
            _add_slice(tpu_slice, span, on_slice.get(tpu_slice.id, ()), sums, now, spans_of)
    rows = [_row(key, totals, jobs) for key, totals in sums.items()]
    return sorted(rows, key=lambda row: -row.chip_hours)


def _add_slice(
    tpu_slice: TpuSlice,
    span: tuple[datetime, datetime],
    attempts: Sequence[Attempt],
    sums: dict[_Key, _Totals],
    now: datetime,
    spans_of: Callable[[Attempt], list[goodput.Span]],
) -> None:
    chips = type_lookup.find(tpu_slice.accelerator).chips

    def totals_of(job_id: JobId | None) -> _Totals:
        simulated = tpu_slice.provider in SIMULATED_PROVIDERS
        key = (job_id, tpu_slice.pool, tpu_slice.accelerator, tpu_slice.capacity, simulated)
        totals = sums.setdefault(key, _Totals(set()))
        totals.slices.add(tpu_slice.id)
        return totals

    left = span[1] - span[0]
    for attempt in attempts:
        used = totals_of(attempt.job_id)
        for part in spans_of(attempt):
            held = _overlap(span, part.begin, part.end)
            used.add(chips * held, part.badput)
            left -= held
    # Booting and waiting for the rest of a gang count for the job that holds the slice, if any.
    if tpu_slice.job_id is not None:
        waited = _waited(tpu_slice, span, attempts, now)
        own = [each.number for each in attempts if each.job_id == tpu_slice.job_id]
        kind = goodput.before_program(min(own, default=0))
        totals_of(tpu_slice.job_id).add(chips * waited, {kind: 1.0})
        left -= waited
    if left > timedelta(0):
        totals_of(None).add(chips * left, {Badput.OTHER: 1.0})


def _waited(
    tpu_slice: TpuSlice,
    span: tuple[datetime, datetime],
    attempts: Sequence[Attempt],
    now: datetime,
) -> timedelta:
    """How long the job that holds the slice has held it without an attempt. A slice of a pool may
    have been idle, or used by other jobs, before."""
    own = [attempt for attempt in attempts if attempt.job_id == tpu_slice.job_id]
    held = (max(span[0], tpu_slice.assigned_at or span[0]), span[1])
    used = sum(
        (_overlap(held, attempt.created_at, attempt.ended_at or now) for attempt in own),
        timedelta(0),
    )
    return max(held[1] - held[0] - used, timedelta(0))


def by_owner(rows: Iterable[CostRow]) -> tuple[CostRow, ...]:
    """Sums, without the jobs."""
    sums: dict[tuple[str, str, str, Capacity, bool], CostRow] = {}
    for row in rows:
        key = (row.owner, row.pool or "", row.accelerator, row.capacity, row.simulated)
        added: dict[str, Any] = {}
        if other := sums.get(key):
            summed = ("slices", "chip_hours", "useful")
            added = {name: getattr(row, name) + getattr(other, name) for name in summed}
            kinds = {**row.badput, **other.badput}
            added["badput"] = {
                kind: row.badput.get(kind, 0.0) + other.badput.get(kind, 0.0) for kind in kinds
            }
        sums[key] = replace(row, job_id=None, job_name="", **added)
    return tuple(sums[key] for key in sorted(sums))


def settle(settled: SettledCosts, rows: Iterable[CostRow], until: datetime) -> SettledCosts:
    """With what was billed from its end until then."""
    return SettledCosts(until=until, rows=by_owner((*settled.rows, *rows)))


def stock(slices: Iterable[TpuSlice], refusals: Iterable[CapacityRefusal]) -> list[StockRow]:
    """Grants, refusals and preemptions by source."""
    by_source: dict[tuple[str, str, str, Capacity], list[TpuSlice]] = {}
    for item in slices:
        key = (item.provider, item.zone, item.accelerator, item.capacity)
        by_source.setdefault(key, []).append(item)
    refused = {
        (no.provider, no.zone, no.accelerator, no.capacity): no
        for no in refusals
        if no.kind is not RefusalKind.UNREACHABLE
    }
    rows = []
    for key in sorted({*by_source, *refused}):
        of_source, refusal = by_source.get(key, []), refused.get(key)
        granted = [item.up_at or item.ready_at for item in of_source]
        moments = [moment for moment in granted if moment is not None]
        waiting = refusal is not None and refusal.streak > 0
        rows.append(
            StockRow(
                provider=key[0],
                zone=key[1],
                accelerator=key[2],
                capacity=key[3],
                granted=len(moments),
                refused=sum(item.loss is LossReason.REFUSED for item in of_source),
                preempted=sum(item.loss is LossReason.PREEMPTED for item in of_source),
                last_granted=max(moments, default=None),
                last_refused=refusal.refused_at if refusal is not None else None,
                not_before=refusal.until if refusal is not None and waiting else None,
                message=refusal.message if refusal is not None else "",
            )
        )
    return rows


def _overlap(span: tuple[datetime, datetime], begin: datetime, end: datetime) -> timedelta:
    return max(min(span[1], end) - max(span[0], begin), timedelta(0))


def _row(key: _Key, totals: _Totals, jobs: Mapping[JobId, Job]) -> CostRow:
    job = jobs.get(key[0]) if key[0] is not None else None
    return CostRow(
        job_id=key[0],
        job_name=job.spec.name if job is not None else "",
        owner=job.owner if job is not None else "",
        pool=key[1],
        accelerator=key[2],
        capacity=key[3],
        slices=len(totals.slices),
        chip_hours=totals.paid / HOUR,
        useful=(totals.paid - sum(totals.badput.values(), timedelta(0))) / HOUR,
        badput={kind: time / HOUR for kind, time in totals.badput.items() if time},
        simulated=key[4],
    )
