"""The queue: which jobs wait, in which order, behind what, until when; and its commands."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta

from tpufleet.errors import BadInput, Conflict
from tpufleet.model.api_types import QueueEntry, QueueMove, QueuePage
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.reservations import Reservation
from tpufleet.model.inbox import InboxMessageKind
from tpufleet.model.job.attempts import Attempt
from tpufleet.model.job.job_edits import JobEdit
from tpufleet.model.job.jobs import WAITING_STATES, Job, JobId, JobState
from tpufleet.model.people.budgets import BUDGET_REPORT, BudgetReport, BudgetUse
from tpufleet.model.values.encoding import from_json
from tpufleet.policy.accounting import budgets
from tpufleet.policy.recovery import liveness
from tpufleet.policy.scheduling import fair_share, queue_order
from tpufleet.policy.scheduling.placement import Occupant
from tpufleet.policy.scheduling.queue_forecast import (
    Claim,
    Forecast,
    QueuedDemand,
    forecast_queue,
)
from tpufleet.service.jobs import commands, queries
from tpufleet.service.jobs.commands import CommandContext, require_live
from tpufleet.service.operations import server_status
from tpufleet.stores.base import ChangeSet, JobQuery, Store

_ALL = 1_000_000
_CHIP_HOUR = 3600.0


def usage_ledger(store: Store) -> fair_share.UsageLedger | None:
    text = store.metadata(fair_share.LEDGER_NAME)
    return from_json(text, fair_share.UsageLedger) if text else None


def usage_steps(store: Store) -> dict[str, int]:
    return fair_share.usage_steps(usage_ledger(store))


def queue_name(job: Job) -> str:
    """Its pool; without a pool, its TPU type."""
    return job.spec.pool or job.spec.accelerator


def waiting_jobs(store: Store) -> list[Job]:
    """In the order in which they are placed."""
    steps = usage_steps(store)
    jobs = store.jobs(JobQuery(states=WAITING_STATES, limit=_ALL))
    waiting = [job for job in jobs if not _has_live_attempt(store, job)]
    return sorted(waiting, key=lambda job: queue_order.queue_rank(job, steps.get(job.owner, 0)))


def _has_live_attempt(store: Store, job: Job) -> bool:
    """A recovering job whose attempt is still stopping is not in the queue yet."""
    if job.state is not JobState.RECOVERING:
        return False
    attempt = store.newest_attempts([job.id]).get(job.id)
    return attempt is not None and attempt.live


def queue_page(
    store: Store,
    now: datetime,
    *,
    pool: str | None = None,
    owner: str | None = None,
) -> QueuePage:
    ledger = usage_ledger(store)
    usage = ledger.usage if ledger is not None else {}
    jobs = waiting_jobs(store)
    queues: dict[str, list[Job]] = {}
    for job in jobs:
        queues.setdefault(queue_name(job), []).append(job)
    forecasts = {
        each.job_id: each for queue in queues.values() for each in _forecast(store, queue, now)
    }
    named = _names(store, [each.behind for each in forecasts.values() if each.behind])
    rows = {row.id: row for row in queries.job_rows(store, jobs)}
    entries = []
    for queue in queues.values():
        position = 0
        for job in queue:
            position += job.held_by is None
            forecast = forecasts.get(job.id)
            behind = forecast.behind if forecast is not None else None
            entries.append(
                QueueEntry(
                    job=rows[job.id],
                    queue=queue_name(job),
                    position=position if job.held_by is None else None,
                    blocked_by=job.reason,
                    behind=named.get(behind) if behind is not None else None,
                    behind_until=forecast.until if forecast is not None else None,
                    earliest_start=forecast.starts_at if forecast is not None else None,
                    owner_chip_hours=round(usage.get(job.owner, 0.0) / _CHIP_HOUR, 1),
                )
            )
    wanted = [
        entry
        for entry in entries
        if pool in (None, entry.job.pool) and owner in (None, entry.job.owner)
    ]
    return QueuePage(entries=tuple(wanted))


def _names(store: Store, job_ids: Sequence[JobId]) -> dict[JobId, str]:
    jobs = (store.job(job_id) for job_id in dict.fromkeys(job_ids))
    return {job.id: f"{job.owner}/{job.spec.name}" for job in jobs if job is not None}


def _forecast(store: Store, queue: Sequence[Job], now: datetime) -> list[Forecast]:
    """Only for a pool: what a cloud has is not known."""
    pool = store.pool(queue[0].spec.pool) if queue[0].spec.pool is not None else None
    if pool is None:
        return []
    lasting = [
        each for each in store.documents(Reservation)
        if each.pool == pool.name and each.ends_at > now
    ]  # fmt: skip
    text = store.metadata(BUDGET_REPORT)
    uses = [use for use in from_json(text, BudgetReport).budgets if use.exhausted] if text else []
    waiting = [
        (job, begins)
        for job in queue
        if job.held_by is None and (begins := _not_before(job, lasting, uses, now)) is not None
    ]
    return _forecast_pool(store, pool, waiting, lasting, now)


def _not_before(
    job: Job, reservations: Sequence[Reservation], uses: Sequence[BudgetUse], now: datetime
) -> datetime | None:
    """When nothing but its place in the queue keeps it waiting; None: unknown."""
    moments = [now, job.not_before or now]
    if job.spec.require_reservation:
        own = [each.starts_at for each in reservations if each.owner == job.owner]
        if not own:
            return None
        moments.append(min(own))
    for use in uses:
        if budgets.holds(use, job):
            end = budgets.period_end(use.period, use.since)
            if end is None:
                return None
            moments.append(end)
    return max(moments)


def queue_of(store: Store, job: Job) -> list[Job]:
    """The jobs that wait for the same, in order."""
    return [each for each in waiting_jobs(store) if queue_name(each) == queue_name(job)]


def jobs_ahead(queue: Sequence[Job], job: Job) -> int:
    before = itertools.takewhile(lambda each: each.id != job.id, queue)
    return sum(each.held_by is None for each in before)


def latest_start(store: Store, queue: Sequence[Job], job: Job, now: datetime) -> datetime | None:
    """When a job of a pool starts at the latest, as far as time limits tell."""
    forecasts = _forecast(store, queue, now) if queue else []
    return next((each.starts_at for each in forecasts if each.job_id == job.id), None)


def _forecast_pool(
    store: Store,
    pool: Pool,
    queue: Sequence[tuple[Job, datetime]],
    reservations: Sequence[Reservation],
    now: datetime,
) -> list[Forecast]:
    """`queue`: the jobs in order, each with the moment before which it does not start."""
    slices = store.slices(pool=pool.name)
    held = Counter(each.job_id for each in slices if each.live and each.job_id is not None)
    free = sum(each.live and each.job_id is None for each in slices)
    headroom = max(0, pool.largest - sum(not each.fenced for each in slices))
    waiting = {job.id for job, _ in queue}
    demands = [
        QueuedDemand(
            job_id=job.id,
            slices=max(0, job.spec.min_slices - held.get(job.id, 0)),
            runs_for=None if job.spec.timeout is None else job.spec.timeout + job.spec.grace,
            owner=job.owner,
            not_before=begins,
        )
        for job, begins in queue
    ]
    holders = occupants(store, held)
    by_owner = Counter[str]()
    for each in holders:
        by_owner[each.owner] += each.slices
    claims = [
        Claim(
            owner=each.owner,
            slices=each.slices - by_owner[each.owner],
            starts_at=each.starts_at,
            ends_at=each.ends_at,
        )
        for each in reservations
        if each.slices > by_owner[each.owner]
    ]
    claims += [
        Claim(owner=each.reserved_for or "", slices=1, starts_at=now, ends_at=each.reserved_until)
        for each in slices
        if each.job_id is None and each.live and each.reserved_until and each.is_reserved(now)
    ]
    others = [each for each in holders if each.job_id not in waiting]
    room = _room(store, pool, {job.owner for job, _ in queue}, by_owner)
    return forecast_queue(demands, free + headroom, others, now, claims, room)


def _room(
    store: Store, pool: Pool, owners: Collection[str], held: Mapping[str, int]
) -> dict[str, int]:
    """How many more slices the quotas of the pool and of the server allow each owner."""
    report = server_status.controller_report(store)
    room = {}
    if report is not None and report.slices_per_user is not None:
        counts = Counter(each.job_id for each in store.slices() if each.live and each.job_id)
        everywhere = Counter[str]()
        for each in occupants(store, counts):
            everywhere[each.owner] += each.slices
        room = {owner: report.slices_per_user - everywhere[owner] for owner in owners}
    if pool.slices_per_user is not None:
        limit = pool.slices_per_user
        room = {each: min(room.get(each, limit), limit - held.get(each, 0)) for each in owners}
    return room


def occupants(store: Store, held: Mapping[JobId, int]) -> list[Occupant]:
    """Jobs that hold slices, with how many."""
    jobs, attempts = store.find_jobs(list(held)), store.attempts_of(list(held))
    return [_occupant(job, attempts.get(job.id, []), held[job.id]) for job in jobs.values()]


def _occupant(other: Job, attempts: Sequence[Attempt], count: int) -> Occupant:
    ends = liveness.timeout_at(other, tuple(attempts))
    return Occupant(
        job_id=other.id,
        priority=other.spec.priority,
        since=other.submitted_at,
        slices=count,
        ends_by=ends + other.spec.grace if ends else None,
        owner=other.owner,
    )


# Commands.


def retry(context: CommandContext, job: Job) -> Job:
    """Request capacity now, without waiting for the backoff. Does nothing for a job that has its
    slices."""
    context.caller.require_job_owner(job)
    require_live(job)
    if job.id not in {each.id for each in waiting_jobs(context.store)}:
        return job
    message = f"{context.caller.name} asked to try again now"
    event = context.job_event(job.id, "retry_requested", message)
    notice = context.message(InboxMessageKind.RETRY, job_id=job.id)
    context.store.commit(ChangeSet(messages=[notice], events=[event]))
    return job


def hold(context: CommandContext, job: Job) -> Job:
    """Keep a job that waits from being placed."""
    context.caller.require_job_owner(job)
    require_live(job)
    if job.id not in {each.id for each in waiting_jobs(context.store)}:
        raise _not_waiting(job)
    if job.held_by is not None:
        return job
    by = context.caller.name
    return commands.edit_job(context, job, JobEdit(job_id=job.id, held_by=by), f"held by {by}")


def release(context: CommandContext, job: Job) -> Job:
    context.caller.require_job_owner(job)
    require_live(job)
    if job.held_by is None:
        raise Conflict(f"job {job.id} is not held")
    if job.held_by not in (context.caller.name, job.owner):
        context.caller.require_admin(f"releasing job {job.id}, which {job.held_by} holds,")
    message = f"released by {context.caller.name}"
    return commands.edit_job(context, job, JobEdit(job_id=job.id, held_by=""), message)


def move(context: CommandContext, job: Job, request: QueueMove) -> Job:
    """Move a job within its queue. Only an admin may move it ahead of jobs of other users."""
    context.caller.require_job_owner(job)
    require_live(job)
    queue = queue_of(context.store, job)
    if job.id not in {each.id for each in queue}:
        raise _not_waiting(job)
    others = [each for each in queue if each.id != job.id]
    if request.last:
        return _put_last(context, job, others)
    target = 0 if request.first else _index_of(context, job, others, request.before)
    before = [each.id for each in queue].index(job.id)
    passed = {each.id: each for each in others[target:before]}
    foreign = [each for each in passed.values() if each.owner != context.caller.name]
    if foreign:
        other = foreign[0]
        context.caller.require_admin(_moved("moving", other))
    if target >= len(others):
        return job
    return _put_before(context, job, others[target], usage_steps(context.store))


def _moved(verb: str, other: Job) -> str:
    return f"{verb} it ahead of {other.owner}/{other.spec.name}"


def _not_waiting(job: Job) -> Conflict:
    return Conflict(f"job {job.id} is {job.state}: it does not wait in this queue")


def _put_before(context: CommandContext, job: Job, other: Job, steps: Mapping[str, int]) -> Job:
    moment = (other.queued_at or other.submitted_at) - timedelta(microseconds=1)
    # The usage of its owner would put it behind the other one: only a higher priority helps.
    outranked = steps.get(job.owner, 0) > steps.get(other.owner, 0)
    priority = other.spec.priority + outranked
    if priority != job.spec.priority:
        commands.require_priority(context.caller, priority)
    edit = JobEdit(job_id=job.id, queued_at=moment, priority=priority)
    by = context.caller.name
    return commands.edit_job(context, job, edit, _moved(f"{by} moved", other))


def _put_last(context: CommandContext, job: Job, others: Sequence[Job]) -> Job:
    if not others:
        return job
    last = max((each.queued_at or each.submitted_at) for each in others)
    lowest = min(job.spec.priority, *(each.spec.priority for each in others))
    edit = JobEdit(
        job_id=job.id, queued_at=max(last, context.now) + timedelta(microseconds=1), priority=lowest
    )
    return commands.edit_job(context, job, edit, f"{context.caller.name} moved it to the end")


def _index_of(context: CommandContext, job: Job, others: Sequence[Job], ref: str | None) -> int:
    if ref is None:
        raise BadInput("where to: give `first`, `last` or `before`")
    other = queries.find_job(context.store, ref, context.caller.name)
    if other.id == job.id:
        raise BadInput(f"job {job.id} cannot be moved ahead of itself")
    for index, each in enumerate(others):
        if each.id == other.id:
            return index
    raise _not_waiting(other)
