"""The next step of one job, from everything known about it.

A job without a live attempt starts one when its whole gang is ready. A live attempt is followed
until all of its processes are known to be gone: reported by the agent, on machines that no longer
run, or after the agent's lease. Only then has it ended, and only then may the next one start; the
deletion of its slices may still go on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import msgspec

from tpufleet.model.events import Event
from tpufleet.model.fleet.hosts import Exit, Host, HostId, Phase, Progress, slice_id_of
from tpufleet.model.fleet.slices import LossReason, SliceId, SliceState, TpuSlice, source_text
from tpufleet.model.job import mounts
from tpufleet.model.job.attempts import Attempt, AttemptState, attempt_id
from tpufleet.model.job.end_reasons import END_REASONS, EndReason
from tpufleet.model.job.jobs import Job, JobState
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.model.values.records import replace
from tpufleet.policy.events import attempt_event, count_of, job_event, slice_event
from tpufleet.policy.recovery import elasticity, liveness, retries, verdicts
from tpufleet.policy.recovery.retries import RETRY_BACKOFF, RetryAction, RetryDecision

USABLE_STATES = frozenset({SliceState.REQUESTED, SliceState.BOOTING, SliceState.READY})
# How often the progress is read of an attempt that is stopped at its next checkpoint.
CHECKPOINT_INTERVAL = timedelta(seconds=2)
_LOST_UNNOTICED = frozenset({LossReason.HOST_LOST, LossReason.OUT_OF_MEMORY, LossReason.VANISHED})
# Ends that are noticed a while after the fault.
_SILENT = frozenset({EndReason.HUNG, EndReason.HOST_LOST})
_END_STATES = {
    RetryAction.SUCCEED: JobState.SUCCEEDED,
    RetryAction.FAIL: JobState.FAILED,
    RetryAction.CANCEL: JobState.CANCELLED,
}


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job with its attempts, slices and hosts."""

    job: Job
    attempts: tuple[Attempt, ...] = ()
    slices: Mapping[SliceId, TpuSlice] = {}  # held, or of its attempt
    hosts: Mapping[SliceId, tuple[Host, ...]] = {}
    progress: Progress | None = None  # latest of the live attempt
    present_since: datetime | None = None  # since when hosts could report without a gap

    @property
    def attempt(self) -> Attempt | None:
        """The live attempt."""
        return self.attempts[-1] if self.attempts and self.attempts[-1].live else None

    @property
    def usable_slices(self) -> tuple[TpuSlice, ...]:
        """Slices held by the job that are ready, or on their way."""
        return tuple(
            tpu_slice
            for tpu_slice in self.slices.values()
            if tpu_slice.job_id == self.job.id and tpu_slice.state in USABLE_STATES
        )

    @property
    def has_enough(self) -> bool:
        """Whether it lacks no slice that it cannot run without."""
        return len(self.usable_slices) >= self.job.spec.min_slices

    @property
    def avoided(self) -> frozenset[SliceId]:
        """Slices with a host that may be why an attempt failed."""
        return frozenset(
            slice_id_of(HostId(attempt.failed_host))
            for attempt in self.attempts
            if attempt.failed_host and attempt.end_reason in retries.MAY_BE_OF_HOST
        )

    def slices_of(self, attempt: Attempt) -> list[TpuSlice]:
        return [self.slices[slice_id] for slice_id in attempt.slices if slice_id in self.slices]

    def hosts_of(self, attempt: Attempt) -> list[Host]:
        return [host for slice_id in attempt.slices for host in self.hosts.get(slice_id, ())]


@dataclass(kw_only=True, slots=True)
class Step:
    """What changes, and when to look again."""

    job: Job
    attempt: Attempt | None = None  # new or changed
    slices: list[TpuSlice] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    wake_at: datetime | None = None

    def changes_nothing(self, view: JobView) -> bool:
        same_attempt = self.attempt is None or self.attempt is view.attempt
        return self.job is view.job and same_attempt and not self.slices


def next_step(view: JobView, now: datetime) -> Step:
    """Idempotent: a second call with the result of the first changes nothing more."""
    if view.job.ended:
        return release_job_slices(view, Step(job=view.job), now)
    if view.attempt is None:
        return _prepare(view, now)
    return follow_attempt(view, view.attempt, now)


def missing_slices(view: JobView, now: datetime) -> int:
    """How many slices to request now. A doomed slice is replaced before it is gone."""
    job = view.job
    if job.ended or job.cancel_requested_by or job.over_limit or _is_backing_off(job, now):
        return 0
    if view.attempt is not None and not will_retry(view, view.attempt, now):
        return 0
    return max(0, elasticity.missing(job.spec, len(view.usable_slices)))


def fail_job(view: JobView, reason: str, advice: str, now: datetime) -> Step:
    """End a job that can never be placed."""
    job = replace(view.job, reason=reason, advice=advice)
    return end_job(view, Step(job=job), JobState.FAILED, EndReason.SETUP_FAILED, now)


# Without a live attempt.


def _prepare(view: JobView, now: datetime) -> Step:
    job = view.job
    if job.cancel_requested_by:
        return end_job(view, Step(job=job), JobState.CANCELLED, EndReason.CANCELLED, now)
    if job.over_limit:
        advice = job.advice or END_REASONS[EndReason.OVER_BUDGET].advice.replace("JOB", job.id)
        over = replace(job, reason=job.over_limit, advice=advice)
        return end_job(view, Step(job=over), JobState.FAILED, EndReason.OVER_BUDGET, now)
    result = Step(job=job, wake_at=job.not_before if _is_backing_off(job, now) else None)
    _release_doomed(view, result, now)
    gang = view.usable_slices
    ready = [tpu_slice for tpu_slice in gang if tpu_slice.state is SliceState.READY]
    if len(ready) >= job.spec.min_slices and not _is_backing_off(job, now):
        until = elasticity.gathers_until(job.spec, gang, view.attempts)
        # A moment that is further away was recorded before the clock was set back.
        if until is None or not now < until <= now + elasticity.GATHER_FOR:
            return _start_attempt(view, result, ready[: job.spec.max_slices], now)
        result.wake_at = until
    # A request that the provider has not accepted is no news: it may be refused at once.
    gang = tuple(tpu_slice for tpu_slice in gang if tpu_slice.state is not SliceState.REQUESTED)
    if job.state in (JobState.QUEUED, JobState.WAITING):
        state = JobState.WAITING if gang else JobState.QUEUED
        if gang and (state is not job.state or job.reason != _waiting_reason(gang)):
            result.job = replace(job, state=state, reason=_waiting_reason(gang))
        elif not gang and job.state is JobState.WAITING:
            result.job = replace(job, state=state, reason="looking for capacity")
        if result.job.state is not job.state:
            result.events.append(job_event(result.job, now))
    elif job.state is JobState.RECOVERING and gang and job.reason != _waiting_reason(gang):
        result.job = replace(job, reason=_waiting_reason(gang))
    return result


def _start_attempt(view: JobView, result: Step, gang: list[TpuSlice], now: datetime) -> Step:
    """Start an attempt on a whole gang."""
    job = view.job
    gang = _in_order(gang, view.attempts[-1].slices if view.attempts else ())
    number = len(view.attempts)
    checkpoints = [
        attempt.checkpoint_step
        for attempt in view.attempts[job.fresh_from :]
        if attempt.checkpoint_step
    ]
    attempt = Attempt(
        id=attempt_id(job.id, number),
        job_id=job.id,
        number=number,
        slices=tuple(tpu_slice.id for tpu_slice in gang),
        created_at=now,
        start_step=max(checkpoints, default=None),
    )
    message = (
        f"starting attempt {number} on {elasticity.size(job.spec, attempt.slices)} × "
        f"{short_name(job.spec.accelerator)} in {_sources(gang)}"
    )
    result.job = replace(job, state=JobState.STARTING, reason=message, not_before=None)
    result.attempt = attempt
    result.events.append(attempt_event(attempt, AttemptState.STARTING, message, now))
    result.wake_at = None
    return result


def _in_order(gang: list[TpuSlice], before: Sequence[SliceId]) -> list[TpuSlice]:
    """Slices of the last attempt keep their positions, and so the ids of their processes, by which
    hosts keep checkpoints and programs. The others follow in the order of their requests."""
    gang = sorted(gang, key=lambda tpu_slice: (tpu_slice.requested_at, tpu_slice.id))
    size = len(gang)
    kept = {before.index(each.id): each for each in gang if each.id in before[:size]}
    others = iter([each for each in gang if each.id not in before[:size]])
    return [kept[position] if position in kept else next(others) for position in range(size)]


# With a live attempt.


def follow_attempt(view: JobView, attempt: Attempt, now: datetime) -> Step:
    attempt = _record_startup(view, attempt, now)
    result = Step(job=view.job, attempt=attempt)
    _release_doomed(view, result, now, keep=attempt.slices)
    _release_unresponsive_slices(view, attempt, result, now)
    if attempt.state is not AttemptState.STOPPING:
        attempt = _check_attempt(view, attempt, result, now)
    if attempt.state is AttemptState.STOPPING:
        if not attempt.aborted and _is_incomplete(view, attempt):
            result.attempt = attempt = replace(attempt, aborted=True)
        _finish_stopping(view, attempt, result, now)
    return result


def will_retry(view: JobView, attempt: Attempt, now: datetime) -> bool:
    """Whether another attempt will follow, as far as is known before this one has ended."""
    if attempt.state is not AttemptState.STOPPING:
        return True
    ended = _ended(view, attempt, now)
    return retries.decide_retry(view.job, ended, (*view.attempts[:-1], ended)).will_retry


def _check_attempt(view: JobView, attempt: Attempt, result: Step, now: datetime) -> Attempt:
    """Stop, end or advance the attempt, whichever applies."""
    hosts = view.hosts_of(attempt)
    reporting = [host for host in hosts if host.attempt_id == attempt.id]
    all_report = len(reporting) == len(hosts) and {host.slice_id for host in hosts} == set(
        attempt.slices
    )
    if all_report:
        attempt = _record_environment(attempt, reporting, result, now)
    if all_report and all(
        host.phase is Phase.EXITED and host.exit and host.exit.clean for host in reporting
    ):
        return _end_attempt(view, attempt, result, now)
    cause, message = _stop_reason(view, attempt, result, now)
    if message:
        attempt = replace(attempt, state=AttemptState.STOPPING, stopping_at=now, stop_reason=cause)
        result.attempt = attempt
        result.job = replace(view.job, state=_stopping_state(view.job), reason=message)
        result.events.append(attempt_event(attempt, cause or "failing", message, now))
        return attempt
    if (
        all_report
        and attempt.state is AttemptState.STARTING
        and all(host.phase in (Phase.RUNNING, Phase.EXITED) for host in reporting)
    ):
        message = f"attempt {attempt.number} running on {count_of(len(hosts), 'host')}"
        if len(attempt.slices) < view.job.spec.max_slices:
            size = elasticity.size(view.job.spec, attempt.slices)
            message += f", {size} slices: {elasticity.cause((*view.attempts[:-1], attempt))}"
        result.attempt = attempt = replace(attempt, state=AttemptState.RUNNING, running_at=now)
        result.job = replace(view.job, state=JobState.RUNNING, reason=message)
        result.events.append(attempt_event(attempt, AttemptState.RUNNING, message, now))
    attempts = (*view.attempts[:-1], attempt)
    result.wake_at = _earliest(
        liveness.timeout_at(view.job, attempts),
        liveness.hung_at(view.job, attempts, view.progress, view.present_since),
    )
    return _grow(view, attempts, result, now)


def _grow(view: JobView, attempts: tuple[Attempt, ...], result: Step, now: datetime) -> Attempt:
    """Stop an elastic attempt that could have more slices, right after a checkpoint."""
    attempt, held = attempts[-1], view.usable_slices
    grows_at = elasticity.grows_at(view.job.spec, attempts, held)
    newest = view.progress.checkpoint_step if view.progress is not None else None
    if grows_at is None or now < grows_at:
        result.wake_at = _earliest(result.wake_at, grows_at)
        if attempt.grows_after is not None:  # the slice is gone again
            result.attempt = attempt = replace(attempt, grows_after=None)
    elif attempt.grows_after is None:
        result.attempt = attempt = replace(attempt, grows_after=newest or 0)
        result.wake_at = _earliest(result.wake_at, now + CHECKPOINT_INTERVAL)
    elif newest is None or newest <= attempt.grows_after:
        result.wake_at = _earliest(result.wake_at, now + CHECKPOINT_INTERVAL)
    else:
        ready = sum(tpu_slice.state is SliceState.READY for tpu_slice in held)
        message = (
            f"{ready} of {view.job.spec.max_slices} slices are ready: continuing on them from "
            f"step {newest}"
        )
        result.attempt = attempt = replace(
            attempt,
            state=AttemptState.STOPPING,
            stopping_at=now,
            stop_reason=EndReason.RESIZED,
        )
        result.job = replace(result.job, state=_stopping_state(view.job), reason=message)
        result.events.append(attempt_event(attempt, EndReason.RESIZED, message, now))
    return attempt


def _record_environment(
    attempt: Attempt, hosts: list[Host], result: Step, now: datetime
) -> Attempt:
    """How the Python environment was made, once all hosts have one."""
    made = [host.environment for host in hosts if host.environment is not None]
    if attempt.environment is not None or not made or len(made) < len(hosts):
        return attempt
    slowest = max(made, key=lambda report: report.seconds)
    which = "" if len(hosts) == 1 else f" on the slowest of {len(hosts)} hosts"
    message = f"Python environment of attempt {attempt.number} ready{which}: {slowest.text}"
    result.attempt = attempt = replace(attempt, environment=slowest)
    result.events.append(attempt_event(attempt, "setup", message, now))
    return attempt


def _record_startup(view: JobView, attempt: Attempt, now: datetime) -> Attempt:
    """As process 0 reports it: when it has started, made a step, and made a new step."""
    for host in view.hosts.get(attempt.slices[0], ()):
        if host.index != 0 or host.attempt_id != attempt.id or host.startup is None:
            continue
        known, reported = attempt.startup, host.startup
        if known is not None and [*map(bool, (known.stepped_at, known.advanced_at))] == [
            *map(bool, (reported.stepped_at, reported.advanced_at))
        ]:
            continue
        moments = ("assigned_at", "started_at", "imported_at", "stepped_at", "advanced_at")
        changes: dict[str, Any] = {
            name: _on_server_clock(at, host, attempt, now)
            for name in moments
            if (at := getattr(reported, name)) is not None
        }
        # Heartbeats of a slice that was lost may have told of an older one.
        start_step = max(reported.checkpoint_step or 0, attempt.start_step or 0) or None
        attempt = replace(attempt, startup=replace(reported, **changes), start_step=start_step)
    return attempt


def _on_server_clock(moment: datetime, host: Host, attempt: Attempt, now: datetime) -> datetime:
    """Between the beginning of the attempt and now, whatever the clock of the host says."""
    passed = moment - attempt.created_at + host.clock_offset
    return attempt.created_at + min(max(passed, timedelta(0)), now - attempt.created_at)


def _stop_reason(
    view: JobView, attempt: Attempt, result: Step, now: datetime
) -> tuple[EndReason | None, str]:
    """The cause (None when a process failed, which the verdict will explain) and a message; an
    empty message when there is no reason to stop."""
    job = view.job
    if job.cancel_requested_by:
        return EndReason.CANCELLED, f"cancelled by {job.cancel_requested_by}; stopping"
    if job.over_limit:
        return EndReason.OVER_BUDGET, f"{job.over_limit}; stopping"
    released = {tpu_slice.id: tpu_slice for tpu_slice in result.slices}
    for slice_id in attempt.slices:
        tpu_slice = released.get(slice_id) or view.slices.get(slice_id)
        if tpu_slice is None or tpu_slice.state is not SliceState.READY:
            reason = _loss_end_reason(tpu_slice)
            return reason, f"slice {slice_id} {verdicts.LOSS_DESCRIPTIONS[reason]}; recovering"
    if (failure := verdicts.first_failure(attempt, view.hosts_of(attempt))) is not None:
        others = "; stopping the other hosts" if len(view.hosts_of(attempt)) > 1 else ""
        return None, f"{verdicts.describe_exit(*failure)}{others}"
    for host in view.hosts_of(attempt):
        if host.attempt_id != attempt.id:
            continue
        if host.phase is Phase.EXITED and host.exit and not host.exit.clean:
            return None, f"host {host.index} of {host.slice_id} stopped its process"
        if host.phase is Phase.IDLE:
            return None, f"agent restarted on host {host.index} of {host.slice_id}"
    attempts = view.attempts
    if _is_due(liveness.timeout_at(job, attempts), now):
        return EndReason.TIMEOUT, f"time limit of {job.spec.timeout} reached; stopping"
    if _is_due(liveness.hung_at(job, attempts, view.progress, view.present_since), now):
        silent = view.progress is None or view.progress.at is None
        what = "progress or output" if silent else "progress"
        return EndReason.HUNG, f"no {what} for {job.spec.hung_after}; stopping"
    return None, ""


def _is_incomplete(view: JobView, attempt: Attempt) -> bool:
    """A process is gone without having been stopped, or hangs. The others may be blocked in a
    collective with it, where no signal reaches them, and can complete no step. A host that got a
    notice still runs."""
    if attempt.stop_reason is EndReason.HUNG or set(attempt.slices) - view.slices.keys():
        return True
    return any(
        tpu_slice.fenced or tpu_slice.silent_since or tpu_slice.loss in _LOST_UNNOTICED
        for tpu_slice in view.slices_of(attempt)
    ) or any(
        host.phase is Phase.IDLE or (host.exit is not None and _is_missing(host.exit))
        for host in view.hosts_of(attempt)
        if host.attempt_id == attempt.id
    )


def _is_missing(exit: Exit) -> bool:
    """It ended too early, or never ran; not when it was stopped and could save."""
    never_ran = exit.status is None and exit.signal is None
    return never_ran or not (exit.clean or exit.stopped_by_agent)


def _cannot_mount(host: Host) -> bool:
    exit = host.exit
    return exit is not None and exit.during_setup and exit.status == mounts.FAILED


def _release_unresponsive_slices(
    view: JobView, attempt: Attempt, result: Step, now: datetime
) -> None:
    """A slice with a host that did not report in time that it stopped is lost as a whole."""
    if not _is_due(_stop_deadline(view, attempt), now):
        return
    for tpu_slice in view.slices_of(attempt):
        if tpu_slice.state not in (SliceState.READY, SliceState.DOOMED):
            continue
        unresponsive = [
            str(host.index)
            for host in view.hosts.get(tpu_slice.id, ())
            if not _has_exited(host, attempt)
        ]
        if unresponsive:
            reason = f"host {', '.join(unresponsive)} did not stop in time"
            loss = tpu_slice.loss or LossReason.HOST_LOST
            released = release_slice(tpu_slice, loss, reason, now)
            result.slices.append(released)
            result.events.append(slice_event(released, now))


def _stop_deadline(view: JobView, attempt: Attempt) -> datetime | None:
    """Hosts that may come back are known to be silent by then; those that did are asked again."""
    up = [host.up_at for host in view.hosts_of(attempt) if host.up_at]
    reachable_since = max(
        [*up, *([view.present_since] if view.present_since else [])], default=None
    )
    deadline = liveness.stop_deadline(view.job, attempt, reachable_since)
    scarce = any(liveness.may_return(tpu_slice) for tpu_slice in view.slices_of(attempt))
    return deadline + liveness.HOST_LOST_AFTER if deadline and scarce else deadline


def _finish_stopping(view: JobView, attempt: Attempt, result: Step, now: datetime) -> None:
    fenced = {tpu_slice.id for tpu_slice in view.slices_of(attempt) if tpu_slice.fenced}
    unknown = set(attempt.slices) - view.slices.keys()  # forgotten, because they are gone
    leases_over_at = liveness.leases_over_at(view.job, attempt)
    if _is_due(leases_over_at, now) or all(
        _has_exited(host, attempt)
        for host in view.hosts_of(attempt)
        if host.slice_id not in fenced | unknown
    ):
        _end_attempt(view, attempt, result, now)
        return
    deadline = _stop_deadline(view, attempt)
    result.wake_at = leases_over_at if _is_due(deadline, now) else deadline


def _end_attempt(view: JobView, attempt: Attempt, result: Step, now: datetime) -> Attempt:
    result.attempt = ended = _ended(view, attempt, now)
    assert ended.end_reason is not None
    decision = retries.decide_retry(view.job, ended, (*view.attempts[:-1], ended))
    message = f"attempt {ended.number} ended: {ended.message}"
    result.events.append(attempt_event(ended, ended.end_reason, message, now))
    if decision.will_retry:
        _recover(view, ended, decision, result, now)
        return ended
    advice = decision.advice.replace("JOB", view.job.id)
    result.job = replace(result.job, reason=decision.reason, advice=advice)
    end_job(view, result, _END_STATES[decision.action], ended.end_reason, now)
    return ended


def _recover(
    view: JobView, ended: Attempt, decision: RetryDecision, result: Step, now: datetime
) -> None:
    result.job = replace(
        result.job,
        state=JobState.RECOVERING,
        reason=decision.reason,
        not_before=now + decision.delay if decision.delay else None,
        fresh_from=ended.number + 1 if decision.from_scratch else view.job.fresh_from,
    )
    result.wake_at = result.job.not_before
    result.events.append(job_event(result.job, now))
    if ended.end_reason is EndReason.SUPERSEDED:
        release_job_slices(view, result, now)  # also what it held beside its gang
        return
    cannot_mount = {
        host.slice_id
        for host in view.hosts_of(ended)
        if host.id == ended.failed_host and _cannot_mount(host)
    }
    unwanted = {
        tpu_slice.id
        for tpu_slice in view.slices_of(ended)
        if decision.action is RetryAction.NEW_SLICES
        or tpu_slice.state is SliceState.DOOMED
        or (tpu_slice.pool and tpu_slice.id in cannot_mount)
    }
    release_job_slices(view, result, now, only=unwanted)


def _ended(view: JobView, attempt: Attempt, now: datetime) -> Attempt:
    verdict = verdicts.judge(attempt, view.slices_of(attempt), view.hosts_of(attempt))
    progress = view.progress or Progress()
    stopping_at = attempt.stopping_at or now
    fault_at = stopping_at
    failed = next((host for host in view.hosts_of(attempt) if host.id == verdict.failed_host), None)
    if failed is not None and failed.exit is not None:
        fault_at = _on_server_clock(failed.exit.at, failed, attempt, now)
    elif verdict.reason in _SILENT and progress.at is not None:
        fault_at = max(progress.at, attempt.created_at)
    finished = verdict.reason is EndReason.FINISHED
    over_limit = verdict.reason is EndReason.OVER_BUDGET and view.job.over_limit
    return replace(
        attempt,
        state=AttemptState.ENDED,
        ended_at=now,
        fault_at=None if finished else min(fault_at, stopping_at),
        end_reason=verdict.reason,
        message=over_limit or verdict.message,
        failed_host=verdict.failed_host,
        checkpoint_step=progress.checkpoint_step or attempt.start_step,
        last_step=progress.step,
        total_steps=progress.total,
        progress_message=progress.message,
        progress_at=progress.at,
        metrics=progress.metrics,
        save_seconds=progress.save_seconds,
    )


# Releasing slices, and ending the job.


def release_slice(tpu_slice: TpuSlice, loss: LossReason, reason: str, now: datetime) -> TpuSlice:
    """Mark a slice for deletion, whatever is left of it."""
    return replace(
        tpu_slice,
        state=SliceState.RELEASING,
        loss=loss,
        reason=reason,
        lost_at=tpu_slice.lost_at or now,
    )


def _release_doomed(
    view: JobView, result: Step, now: datetime, keep: Collection[SliceId] = ()
) -> None:
    """Slices that no attempt uses, and none will."""
    for tpu_slice in view.slices.values():
        of_job = tpu_slice.job_id == view.job.id and tpu_slice.id not in keep
        if of_job and tpu_slice.state is SliceState.DOOMED:
            loss = tpu_slice.loss or LossReason.PREEMPTED
            result.slices.append(release_slice(tpu_slice, loss, tpu_slice.reason, now))


def release_job_slices(
    view: JobView, result: Step, now: datetime, only: set[SliceId] | None = None
) -> Step:
    """Return slices to their pool if they are healthy, else to the provider."""
    changed = {tpu_slice.id: tpu_slice for tpu_slice in result.slices}
    for slice_id, before in view.slices.items():
        tpu_slice = changed.get(slice_id, before)
        if tpu_slice.job_id != view.job.id or (only is not None and slice_id not in only):
            continue
        if tpu_slice.state in (SliceState.RELEASING, SliceState.GONE):
            continue
        if tpu_slice.pool and tpu_slice.state is not SliceState.DOOMED:
            released = replace(tpu_slice, job_id=None, idle_since=now, reason="free")
        else:
            loss = tpu_slice.loss or LossReason.RELEASED
            released = release_slice(tpu_slice, loss, "no longer needed", now)
            result.events.append(slice_event(released, now))
        changed[slice_id] = released
    result.slices = list(changed.values())
    return result


def end_job(
    view: JobView, result: Step, state: JobState, end_reason: EndReason, now: datetime
) -> Step:
    reason = result.job.reason
    if state is JobState.CANCELLED:
        reason = f"cancelled by {view.job.cancel_requested_by}"
    result.job = replace(
        result.job,
        state=state,
        reason=reason,
        ended_at=now,
        end_reason=end_reason,
        not_before=None,
    )
    result.events.append(job_event(result.job, now))
    result.wake_at = None
    return release_job_slices(view, result, now)


def _waiting_reason(gang: tuple[TpuSlice, ...]) -> str:
    ready = sum(1 for tpu_slice in gang if tpu_slice.state is SliceState.READY)
    return f"waiting for slices in {_sources(gang)}: {ready} of {len(gang)} ready"


def _sources(gang: tuple[TpuSlice, ...] | list[TpuSlice]) -> str:
    return ", ".join(
        sorted({source_text(item.provider, item.zone, item.capacity) for item in gang})
    )


def _has_exited(host: Host, attempt: Attempt) -> bool:
    """The agent reported that no process of this attempt is left."""
    return host.attempt_id == attempt.id and host.phase is Phase.EXITED


def _loss_end_reason(tpu_slice: TpuSlice | None) -> EndReason:
    loss = tpu_slice.loss if tpu_slice is not None else None
    return verdicts.END_REASON_OF_LOSS.get(loss or LossReason.HOST_LOST, EndReason.HOST_LOST)


def _stopping_state(job: Job) -> JobState:
    """While it stops, a job is shown as recovering, unless it is being cancelled."""
    return job.state if job.cancel_requested_by else JobState.RECOVERING


def _is_due(moment: datetime | None, now: datetime) -> bool:
    return moment is not None and moment <= now


def _is_backing_off(job: Job, now: datetime) -> bool:
    """A moment that is further away than any backoff was recorded before the clock was set back."""
    if job.not_before is None:
        return False
    return now < job.not_before <= now + RETRY_BACKOFF.longest


def _earliest(*moments: datetime | None) -> datetime | None:
    return min((moment for moment in moments if moment is not None), default=None)
