"""Why a job waits and until when, what it is doing, or why it ended: in words."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta

from tpufleet.model.api_types import AttemptSummary, JobExplanation, JobRow, SliceRow
from tpufleet.model.attempts import Attempt, AttemptState
from tpufleet.model.end_reasons import END_REASONS
from tpufleet.model.hosts import Progress
from tpufleet.model.jobs import Job, JobId, JobState
from tpufleet.model.pools import CapacityRefusal
from tpufleet.policy import liveness, placement
from tpufleet.policy.capacity import CapacitySource, RefusalHistory
from tpufleet.policy.placement import Occupant
from tpufleet.service import queries
from tpufleet.stores.base import JobQuery, Store

_IN_LINE = frozenset({JobState.QUEUED, JobState.WAITING, JobState.RECOVERING})


def explain(store: Store, job: Job, now: datetime) -> JobExplanation:
    attempts = store.attempts(job.id)
    told = tuple(_attempt_words(attempt, now) for attempt in attempts)
    if job.ended:
        return _why_ended(job, attempts, told)
    if attempts and attempts[-1].live:
        return _why_busy(store, job, attempts, told, now)
    return _why_waiting(store, job, attempts, told, now)


def _why_waiting(
    store: Store,
    job: Job,
    attempts: list[Attempt],
    told: tuple[AttemptSummary, ...],
    now: datetime,
) -> JobExplanation:
    ahead = jobs_ahead(store, job)
    because, moments = [], []
    if attempts and attempts[-1].end_reason is not None:
        because.append(f"attempt {attempts[-1].number} ended: {told[-1].message}")
    if job.cancel_requested_by is not None:
        because.append(f"{job.cancel_requested_by} asked to cancel it")
    if job.not_before is not None and job.not_before > now:
        because.append(f"it backs off for another {format_duration(job.not_before - now)}")
        moments.append(job.not_before)
    if ahead:
        queue = f"pool {job.spec.pool}" if job.spec.pool else job.spec.accelerator
        are = "job is" if ahead == 1 else "jobs are"
        because.append(f"{ahead} {are} ahead of it in the queue for {queue}")
    elif (turn := latest_start_in_pool(store, job)) is not None:
        because.append(
            f"it is next in pool {job.spec.pool}, and can start in {format_duration(turn - now)} at the "
            "latest: then the time limits of enough jobs before it end"
        )
        moments.append(turn)
    refusals = blocking_refusals(store, job, now)
    for refusal in refusals:
        because.append(
            f"{refusal.capacity} {refusal.accelerator} in {refusal.zone} was refused "
            f"({refusal.message}); asked again in {format_duration(refusal.until - now)}"
        )
    if refusals:
        moments.append(min(refusal.until for refusal in refusals))
    for tpu_slice in queries.slice_rows(store, store.slices(job_id=job.id), now):
        because.append(
            f"slice {tpu_slice.id} is {tpu_slice.state} since it was asked for "
            f"{format_duration(now - tpu_slice.requested_at)} ago, {tpu_slice.hosts_seen} of "
            f"{tpu_slice.hosts} hosts are up{_said(tpu_slice)}"
        )
    return JobExplanation(
        job_id=job.id,
        state=job.state,
        message=f"{job.state} for {format_duration(now - job.submitted_at)}: {job.reason}",
        details=tuple(because),
        until=max(moments, default=None),
        ahead=ahead,
        advice=job.advice,
        attempts=told,
    )


def _said(tpu_slice: SliceRow) -> str:
    """What the provider says about it, where that is more than its state."""
    return f": {tpu_slice.reason}" if tpu_slice.reason not in ("", tpu_slice.state) else ""


def _why_busy(
    store: Store,
    job: Job,
    attempts: list[Attempt],
    told: tuple[AttemptSummary, ...],
    now: datetime,
) -> JobExplanation:
    row: JobRow = queries.job_rows(store, [job])[0]
    because = [f"attempt {attempts[-1].number}: {told[-1].message}"]
    if row.progress is not None:
        because.append(describe_progress(row.progress, now))
    if job.cancel_requested_by is not None:
        because.append(f"{job.cancel_requested_by} asked to cancel it")
    limit = liveness.timeout_at(job, tuple(attempts))
    if limit is not None:
        because.append(f"its time limit ends in {format_duration(limit - now)}")
    return JobExplanation(
        job_id=job.id,
        state=job.state,
        message=f"{job.state}: {job.reason}",
        details=tuple(because),
        until=limit,
        advice=job.advice,
        attempts=told,
    )


def _why_ended(
    job: Job, attempts: list[Attempt], told: tuple[AttemptSummary, ...]
) -> JobExplanation:
    because = []
    if attempts:
        because.append(f"attempt {attempts[-1].number}: {told[-1].message}")
    ending = END_REASONS.get(job.end_reason) if job.end_reason is not None else None
    if ending is not None and job.state is not JobState.SUCCEEDED:
        because.append(f"{ending.description}, recognised by this: {ending.detected_by}")
    advice = job.advice or (ending.advice if ending is not None else "")
    return JobExplanation(
        job_id=job.id,
        state=job.state,
        message=f"{job.state}: {job.reason}",
        details=tuple(because),
        advice=advice.replace("JOB", job.id),
        attempts=told,
    )


def jobs_ahead(store: Store, job: Job) -> int:
    """Jobs in the same queue (the pool, or the type outside pools) that go first."""
    waiting = store.jobs(JobQuery(states=_IN_LINE, pool=job.spec.pool, limit=1_000_000))
    mine = _place_in_line(job)
    return sum(
        1
        for other in waiting
        if other.id != job.id
        and other.spec.pool == job.spec.pool
        and (job.spec.pool is not None or other.spec.accelerator == job.spec.accelerator)
        and _place_in_line(other) < mine
    )


def latest_start_in_pool(store: Store, job: Job) -> datetime | None:
    """When a job that is next in its pool can start at the latest, where time limits tell that."""
    pool = store.pool(job.spec.pool) if job.spec.pool is not None else None
    if pool is None:
        return None
    slices = store.slices(pool=pool.name)
    held = Counter(each.job_id for each in slices if each.live and each.job_id is not None)
    free = sum(each.live and each.job_id is None for each in slices)
    headroom = max(0, pool.largest - len(slices))
    short = job.spec.slices - held.pop(job.id, 0) - free - headroom
    if short <= 0 or job.spec.slices > pool.largest:
        return None
    return placement.earliest_start(
        [_occupant(store, each, count) for each, count in held.items()], short
    )


def _occupant(store: Store, job_id: JobId, count: int) -> Occupant:
    other = store.job(job_id)
    assert other is not None  # slices are held for jobs that there are
    ends = liveness.timeout_at(other, tuple(store.attempts(job_id)))
    return Occupant(
        job_id=job_id,
        priority=other.spec.priority,
        since=other.submitted_at,
        slices=count,
        ends_by=ends + other.spec.grace if ends else None,
    )


def blocking_refusals(store: Store, job: Job, now: datetime) -> list[CapacityRefusal]:
    """Refusals that keep this job from what it asks for, the soonest to be asked again first."""
    refusals = store.refusals()
    memory = RefusalHistory(refusals)
    pool = store.pool(job.spec.pool) if job.spec.pool is not None else None
    wanted = job.spec if pool is None else pool
    providers = job.spec.providers if pool is None else (pool.provider,)
    found = {}
    for place in {CapacitySource(each.provider, each.zone, each.capacity) for each in refusals}:
        allowed = (
            place.capacity in wanted.capacity
            and (not wanted.zones or place.zone in wanted.zones)
            and (not providers or place.provider in providers)
        )
        blocking = memory.blocking(place, job.spec.accelerator, now) if allowed else None
        if blocking is not None:
            found[blocking.key] = blocking
    return sorted(found.values(), key=lambda refusal: (refusal.until, refusal.key))


def describe_progress(progress: Progress, now: datetime) -> str:
    words = []
    if progress.step is not None:
        total = f" of {progress.total}" if progress.total is not None else ""
        words.append(f"step {progress.step}{total}")
    if progress.checkpoint_step is not None:
        words.append(f"newest checkpoint at step {progress.checkpoint_step}")
    if progress.message:
        words.append(progress.message)
    if progress.at is not None:
        words.append(f"said {format_duration(now - progress.at)} ago")
    return ", ".join(words) or "it has not said how far it is"


def format_duration(time: timedelta) -> str:
    """The two largest parts: `2 h 5 min`."""
    seconds = max(0, round(time.total_seconds()))
    parts = []
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"


def _attempt_words(attempt: Attempt, now: datetime) -> AttemptSummary:
    if attempt.state is AttemptState.ENDED:
        reason = attempt.end_reason
        words = attempt.message or (
            END_REASONS[reason].description if reason is not None else "ended"
        )
    else:
        since = attempt.stopping_at or attempt.running_at or attempt.created_at
        words = f"{attempt.state} for {format_duration(now - since)} on {', '.join(attempt.slices)}"
        if attempt.stop_reason is not None:
            words += f", told to stop: {END_REASONS[attempt.stop_reason].description}"
    return AttemptSummary(
        number=attempt.number,
        state=attempt.state,
        end_reason=attempt.end_reason,
        message=words,
    )


def _place_in_line(job: Job) -> tuple[int, datetime, str]:
    return (-job.spec.priority, job.submitted_at, job.id)
