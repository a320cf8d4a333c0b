"""Explain a job: why it waits and until when, what it is doing, or why it ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta

from tpufleet.model.api_types import AttemptSummary, JobExplanation, JobRow, SliceRow
from tpufleet.model.fleet.hosts import Progress
from tpufleet.model.fleet.pools import CapacityRefusal, RefusalKind
from tpufleet.model.fleet.server_status import CONTACT
from tpufleet.model.fleet.slices import SliceState
from tpufleet.model.job.attempts import Attempt, AttemptState
from tpufleet.model.job.end_reasons import END_REASONS, EndReason
from tpufleet.model.job.jobs import Job, JobState
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.policy.events import count_of
from tpufleet.policy.recovery import elasticity, job_step, liveness, recovery_time
from tpufleet.policy.scheduling.source_choice import CapacitySource, RefusalHistory
from tpufleet.service.fleet import capacity_sources
from tpufleet.service.jobs import job_queue, queries
from tpufleet.service.operations import server_status
from tpufleet.stores.base import Store

_REFUSED = {
    RefusalKind.CAPACITY: "no capacity",
    RefusalKind.QUOTA: "no quota",
    RefusalKind.ACCESS: "no access",
    RefusalKind.REQUEST: "invalid request",
    RefusalKind.UNREACHABLE: "no contact",
}


MAX_RECOVERIES = 5


def explain(store: Store, job: Job, now: datetime) -> JobExplanation:
    attempts = store.attempts(job.id)
    brief = JobExplanation(
        job_id=job.id,
        state=job.state,
        message=f"{job.state}: {job.reason}",
        advice=job.advice,
        attempts=tuple(_summarize(attempt, now) for attempt in attempts),
    )
    if job.ended:
        return _explain_ended(job, attempts, brief, store.files_deleted_at(job.id))
    if not attempts or not attempts[-1].live:
        return _explain_waiting(store, job, attempts, brief, now)
    return _explain_running(store, job, attempts, brief, now)


def _explain_waiting(
    store: Store, job: Job, attempts: list[Attempt], brief: JobExplanation, now: datetime
) -> JobExplanation:
    queue = job_queue.queue_of(store, job)
    ahead = job_queue.jobs_ahead(queue, job)
    start = job_queue.latest_start(store, queue, job, now)
    last_end = attempts[-1].ended_at if attempts else None
    waited = now - (last_end or job.submitted_at)
    details, moments = [], []
    if attempts and attempts[-1].end_reason is not None:
        details.append(f"attempt {attempts[-1].number} ended: {brief.attempts[-1].message}")
    if job.cancel_requested_by is not None:
        details.append(f"cancellation requested by {job.cancel_requested_by}")
    if job.not_before is not None and job.not_before > now:
        details.append(f"in backoff for another {format_duration(job.not_before - now)}")
        moments.append(job.not_before)
    if ahead:
        name = f"pool {job.spec.pool}" if job.spec.pool else short_name(job.spec.accelerator)
        when = f"; starts in {format_duration(start - now)} at the latest" if start else ""
        details.append(f"{count_of(ahead, 'job')} ahead in the queue for {name}{when}")
    elif start is not None and start > now:
        details.append(
            f"next in pool {job.spec.pool}; starts in {format_duration(start - now)} at the latest"
        )
    moments += [start] if start is not None and (ahead or start > now) else []
    refusals = blocking_refusals(store, job, now)
    details += [_describe_refusal(job, refusal, now) for refusal in refusals]
    details += provider_problems(store, job, now)
    if refusals:
        moments.append(min(refusal.until for refusal in refusals))
    rows = queries.slice_rows(store, store.slices(job_id=job.id), now)
    details += [_describe_slice(row, now) for row in rows if row.state is not SliceState.RELEASING]
    released = [row.id for row in rows if row.state is SliceState.RELEASING]
    if released:
        details.append(f"being released: {', '.join(released)}")
    return replace(
        brief,
        message=f"{job.state} for {format_duration(waited)}: {job.reason}",
        details=tuple(details),
        until=max(moments, default=None),
        ahead=ahead,
        sources=capacity_sources.source_statuses(store, job, now),
    )


def _describe_slice(tpu_slice: SliceRow, now: datetime) -> str:
    return (
        f"slice {tpu_slice.id} is {tpu_slice.state}, requested "
        f"{format_duration(now - tpu_slice.requested_at)} ago; {tpu_slice.hosts_seen} of "
        f"{tpu_slice.hosts} hosts are up{_provider_reason(tpu_slice)}"
    )


def _describe_refusal(job: Job, refusal: CapacityRefusal, now: datetime) -> str:
    retry = format_duration(refusal.until - now)
    if refusal.kind is RefusalKind.UNREACHABLE:
        again = f"at once with `tpu queue retry {job.id}`"
        return f"{refusal.message}; one slice tries again in {retry}, or {again}"
    return (
        f"{_REFUSED[refusal.kind]} for {short_name(refusal.accelerator)} ({refusal.capacity}) in "
        f"{refusal.zone}: {refusal.message}; retry in {retry}"
    )


def _provider_reason(tpu_slice: SliceRow) -> str:
    """What the provider reports, where that is more than the state."""
    return f": {tpu_slice.reason}" if tpu_slice.reason not in ("", tpu_slice.state) else ""


def _explain_running(
    store: Store,
    job: Job,
    attempts: list[Attempt],
    brief: JobExplanation,
    now: datetime,
) -> JobExplanation:
    row: JobRow = queries.job_rows(store, [job])[0]
    details = [_last_attempt(brief)]
    details += _setup_details(store, attempts[-1])
    details += _recovery_details(attempts)
    details += _growth_details(store, job, attempts, now)
    held = store.slices(job_id=job.id)
    silent = [each for each in held if each.silent_since is not None]
    details += [_describe_slice(each, now) for each in queries.slice_rows(store, silent, now)]
    if row.progress is not None:
        details.append(describe_progress(row.progress, now))
        if (output_at := row.progress.output_at) is not None:
            never = output_at == attempts[-1].running_at
            output = "no output of host 0 for {}" if never else "last output of host 0 {} ago"
            details.append(output.format(format_duration(now - output_at)))
    ends = [each.ends_at for each in held if each.id in attempts[-1].slices and each.ends_at]
    if (end := min(ends, default=None)) is not None:
        details.append(
            f"its capacity ends in {format_duration(end - now)}, at {end:%Y-%m-%d %H:%M} UTC: it "
            "is asked to save and stop before, and continues on other capacity"
        )
    if job.cancel_requested_by is not None:
        details.append(f"cancellation requested by {job.cancel_requested_by}")
    limit = liveness.timeout_at(job, tuple(attempts))
    if limit is not None:
        details.append(f"its time limit expires in {format_duration(limit - now)}")
    return replace(brief, details=tuple(details), until=limit)


def _last_attempt(brief: JobExplanation) -> str:
    return f"attempt {brief.attempts[-1].number}: {brief.attempts[-1].message}"


def _growth_details(store: Store, job: Job, attempts: list[Attempt], now: datetime) -> list[str]:
    """What keeps an elastic job from running on all of its slices."""
    attempt = attempts[-1]
    if len(attempt.slices) >= job.spec.max_slices or attempt.state is AttemptState.STOPPING:
        return []
    size = elasticity.size(job.spec, attempt.slices)
    since = format_duration(now - attempt.created_at)
    details = [f"on {size} slices for {since}: {elasticity.cause(attempts)}"]
    held = store.slices(job_id=job.id)
    if len(held) < job.spec.max_slices:
        refusals = blocking_refusals(store, job, now)
        details += [_describe_refusal(job, refusal, now) for refusal in refusals]
    rows = queries.slice_rows(store, [each for each in held if each.id not in attempt.slices], now)
    details += [_describe_slice(row, now) for row in rows]
    usable = [each for each in held if each.state in job_step.USABLE_STATES]
    grows_at = elasticity.grows_at(job.spec, attempts, usable)
    if grows_at is not None:
        wait = f" in {format_duration(grows_at - now)}" if grows_at > now else ""
        details.append(f"continues on more slices at its first checkpoint{wait}")
    return details


def _setup_details(store: Store, attempt: Attempt) -> list[str]:
    """How far the hosts are with the code, the Python environment and `setup`."""
    if attempt.environment is not None:
        return [f"Python environment: {attempt.environment.text}"]
    if attempt.state is not AttemptState.STARTING:
        return []
    hosts = [host for slice_id in attempt.slices for host in store.hosts(slice_id)]
    phases = Counter(host.phase for host in hosts if host.attempt_id == attempt.id)
    busy = ", ".join(f"{count} in {phase}" for phase, count in sorted(phases.items()))
    return [f"of {count_of(len(hosts), 'host')}: {busy}"] if busy else []


def _recovery_details(attempts: list[Attempt]) -> list[str]:
    return [each.text for each in recovery_time.recoveries(attempts)[-MAX_RECOVERIES:]]


def _explain_ended(
    job: Job, attempts: list[Attempt], brief: JobExplanation, files_deleted_at: datetime | None
) -> JobExplanation:
    details = [_last_attempt(brief)] if attempts else []
    details += _recovery_details(attempts)
    info = END_REASONS.get(job.end_reason) if job.end_reason is not None else None
    # Without an attempt, nothing was detected on a host: the reason says why it was not placed. A
    # program error is in the message already, with the exit status by which it is known.
    placed = bool(attempts) or job.end_reason is not EndReason.SETUP_FAILED
    plain = job.state is JobState.SUCCEEDED or job.end_reason is EndReason.USER_ERROR
    if info is not None and placed and not plain:
        details.append(f"{info.description} (detected by: {info.detected_by})")
    advice = job.advice or (info.advice if info is not None else "")
    if files_deleted_at is not None and job.state is not JobState.SUCCEEDED:
        advice = (
            f"its logs and code were deleted on {files_deleted_at:%Y-%m-%d}: submit it from the "
            "folder of its code, with `tpu run`"
        )
    return replace(brief, details=tuple(details), advice=advice.replace("JOB", job.id))


def blocking_refusals(store: Store, job: Job, now: datetime) -> list[CapacityRefusal]:
    """Refusals that keep this job from its capacity, the soonest to be retried first."""
    refusals = store.refusals()
    history = RefusalHistory(refusals)
    pool = store.pool(job.spec.pool) if job.spec.pool is not None else None
    wanted = job.spec if pool is None else pool
    providers = job.spec.providers if pool is None else (pool.provider,)
    blocking_by_key = {
        refusal.key: refusal
        for refusal in history.unreachable()
        if refusal.holds(now) and (not providers or refusal.provider in providers)
    }
    for source in {CapacitySource(each.provider, each.zone, each.capacity) for each in refusals}:
        allowed = (
            source.capacity in wanted.capacity
            and (not wanted.zones or source.zone in wanted.zones)
            and (not providers or source.provider in providers)
        )
        blocking = history.blocking(source, job.spec.accelerator, now) if allowed else None
        if blocking is not None:
            blocking_by_key[blocking.key] = blocking
    return sorted(blocking_by_key.values(), key=lambda refusal: (refusal.until, refusal.key))


def provider_problems(store: Store, job: Job, now: datetime) -> list[str]:
    """Failing provider calls that may keep this job waiting, other than refusals."""
    report = server_status.controller_report(store)
    if report is None:
        return []
    if server_status.is_stale(report, now):
        return ["no controller is running; start one with `tpu serve`"]
    pool = store.pool(job.spec.pool) if job.spec.pool is not None else None
    providers = job.spec.providers if pool is None else (pool.provider,)
    problems = {
        (health.name, problem.message): f"provider {health.name}: {problem.call} fails{where} "
        f"for {format_duration(now - problem.since)}: {problem.message}"
        for health in report.providers
        if not providers or health.name in providers
        for problem in reversed(health.problems)  # of several with one cause, the first is kept
        if problem.call not in ("request", CONTACT)  # shown as refusals
        and (problem.zone is None or not job.spec.zones or problem.zone in job.spec.zones)
        for where in ([f" in {problem.zone}"] if problem.zone else [""])
    }
    return list(problems.values())


def describe_progress(progress: Progress, now: datetime) -> str:
    parts = []
    if progress.step is not None:
        total = f" of {progress.total}" if progress.total is not None else ""
        parts.append(f"step {progress.step}{total}")
    if progress.checkpoint_step is not None:
        parts.append(f"newest checkpoint at step {progress.checkpoint_step}")
    if progress.message:
        parts.append(progress.message)
    if progress.at is not None:
        parts.append(f"reported {format_duration(now - progress.at)} ago")
    return ", ".join(parts) or "no progress reported"


def format_duration(time: timedelta) -> str:
    """The two largest units: `2 h 5 min`."""
    seconds = max(0, round(time.total_seconds()))
    parts = []
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"


def _summarize(attempt: Attempt, now: datetime) -> AttemptSummary:
    if attempt.state is AttemptState.ENDED:
        reason = attempt.end_reason
        message = attempt.message or (
            END_REASONS[reason].description if reason is not None else "ended"
        )
    else:
        since = attempt.stopping_at or attempt.running_at or attempt.created_at
        message = (
            f"{attempt.state} for {format_duration(now - since)} on {', '.join(attempt.slices)}"
        )
        if attempt.stop_reason is not None:
            message += f", stopping: {END_REASONS[attempt.stop_reason].description}"
    return AttemptSummary(
        number=attempt.number,
        state=attempt.state,
        end_reason=attempt.end_reason,
        message=message,
    )
