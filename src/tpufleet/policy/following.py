"""Following a live attempt until every process of it is known to be gone. Only then has it
ended, and what follows is decided."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from tpufleet.model.attempts import Attempt, AttemptState
from tpufleet.model.endings import EndReason
from tpufleet.model.hosts import Host, Phase
from tpufleet.model.jobs import Job, JobState
from tpufleet.model.slices import LossReason, SliceState, TpuSlice
from tpufleet.policy import handing_back, liveness, retries, telling, verdicts
from tpufleet.policy.job_views import JobView, Step
from tpufleet.policy.retries import RetryAction, RetryDecision


def follow_attempt(view: JobView, attempt: Attempt, now: datetime) -> Step:
    result = Step(job=view.job, attempt=attempt)
    _give_up_stubborn_slices(view, attempt, result, now)
    if attempt.state is not AttemptState.STOPPING:
        _watch(view, attempt, result, now)
    attempt = result.attempt
    assert attempt is not None
    if attempt.state is AttemptState.STOPPING:
        _finish_stopping(view, attempt, result, now)
    return result


def _watch(view: JobView, attempt: Attempt, result: Step, now: datetime) -> None:
    """Is there a reason to stop, has everything finished, or has everything started?"""
    hosts = view.hosts_of(attempt)
    reporting = [host for host in hosts if host.attempt_id == attempt.id]
    everybody = len(reporting) == len(hosts) and {host.slice_id for host in hosts} == set(
        attempt.slices
    )
    if everybody and all(
        host.phase is Phase.EXITED and host.exit and host.exit.clean for host in reporting
    ):
        _end_attempt(view, attempt, result, now)
        return
    cause, words = _reason_to_stop(view, attempt, result, now)
    if words:
        result.attempt = replace(
            attempt, state=AttemptState.STOPPING, stopping_at=now, stop_because=cause
        )
        result.job = replace(view.job, state=_stopping_state(view.job), reason=words)
        result.events.append(telling.attempt_event(result.attempt, cause or "failing", words, now))
        return
    if (
        everybody
        and attempt.state is AttemptState.STARTING
        and all(host.phase in (Phase.RUNNING, Phase.EXITED) for host in reporting)
    ):
        words = f"attempt {attempt.number} runs on {telling.count_of(len(hosts), 'host')}"
        result.attempt = attempt = replace(
            attempt, state=AttemptState.RUNNING, running_at=now
        )
        result.job = replace(view.job, state=JobState.RUNNING, reason=words)
        result.events.append(telling.attempt_event(attempt, AttemptState.RUNNING, words, now))
    attempts = (*view.attempts[:-1], attempt)
    result.wake_at = _soonest(
        liveness.timeout_at(view.job, attempts),
        liveness.hung_at(view.job, attempts, view.progress),
    )


def _reason_to_stop(
    view: JobView, attempt: Attempt, result: Step, now: datetime
) -> tuple[EndReason | None, str]:
    """The cause, where it is ours to name (else a process failed and the verdict tells), and
    words; no words when all is well."""
    job = view.job
    if job.cancel_requested_by:
        return EndReason.CANCELLED, f"cancelled by {job.cancel_requested_by}; stopping"
    given_up = {tpu_slice.id: tpu_slice for tpu_slice in result.slices}
    for slice_id in attempt.slices:
        tpu_slice = given_up.get(slice_id) or view.slices.get(slice_id)
        if tpu_slice is None or tpu_slice.state is not SliceState.READY:
            reason = _loss_reason(tpu_slice)
            return reason, f"slice {slice_id} {verdicts.LOSS_DESCRIPTIONS[reason]}; recovering"
    for host in view.hosts_of(attempt):
        if host.attempt_id != attempt.id:
            continue
        if host.phase is Phase.EXITED and host.exit and not host.exit.clean:
            if not host.exit.stopped_by_agent:
                return None, f"{verdicts.describe_exit(host, host.exit)}; stopping the others"
            return None, f"host {host.index} of {host.slice_id} stopped its process"
        if host.phase is Phase.IDLE:
            return None, f"the agent on host {host.index} of {host.slice_id} was restarted"
    attempts = view.attempts
    if _due(liveness.timeout_at(job, attempts), now):
        return EndReason.TIMEOUT, f"ran for its whole time limit of {job.spec.timeout}; stopping"
    if _due(liveness.hung_at(job, attempts, view.progress), now):
        return EndReason.HUNG, f"no progress for {job.spec.hung_after}; stopping"
    return None, ""


def _give_up_stubborn_slices(
    view: JobView, attempt: Attempt, result: Step, now: datetime
) -> None:
    """A slice with a host that was told to stop and did not say so in time is lost as a whole."""
    if not _due(liveness.stop_deadline(view.job, attempt), now):
        return
    for tpu_slice in view.slices_of(attempt):
        if tpu_slice.state not in (SliceState.READY, SliceState.DOOMED):
            continue
        stubborn = [
            str(host.index)
            for host in view.hosts.get(tpu_slice.id, ())
            if not _quiet(host, attempt)
        ]
        if stubborn:
            words = f"host {', '.join(stubborn)} did not stop in time"
            lost = handing_back.release_slice(tpu_slice, tpu_slice.loss or LossReason.HOST_LOST, words, now)
            result.slices.append(lost)
            result.events.append(telling.slice_event(lost, now))


def _finish_stopping(view: JobView, attempt: Attempt, result: Step, now: datetime) -> None:
    present = {
        tpu_slice.id
        for tpu_slice in view.slices_of(attempt)
        if tpu_slice.state is not SliceState.GONE
    }
    hosts = view.hosts_of(attempt)
    if all(_quiet(host, attempt) for host in hosts if host.slice_id in present):
        _end_attempt(view, attempt, result, now)
        return
    deadline = liveness.stop_deadline(view.job, attempt)
    # Past it, the slices were given up; news that they are gone will come by itself.
    result.wake_at = None if _due(deadline, now) else deadline


def _end_attempt(view: JobView, attempt: Attempt, result: Step, now: datetime) -> None:
    result.attempt = ended = _ended(view, attempt, now)
    assert ended.end_reason is not None
    sequel = retries.decide_retry(view.job, ended, (*view.attempts[:-1], ended))
    words = f"attempt {ended.number} ended: {ended.message}"
    result.events.append(telling.attempt_event(ended, ended.end_reason, words, now))
    if sequel.will_retry:
        _go_on(view, ended, sequel, result, now)
        return
    states = {
        RetryAction.SUCCEED: JobState.SUCCEEDED,
        RetryAction.FAIL: JobState.FAILED,
        RetryAction.CANCEL: JobState.CANCELLED,
    }
    advice = sequel.advice.replace("JOB", view.job.id)
    result.job = replace(result.job, reason=sequel.reason, advice=advice)
    handing_back.end_job(view, result, states[sequel.action], ended.end_reason, now)


def _go_on(view: JobView, ended: Attempt, sequel: RetryDecision, result: Step, now: datetime) -> None:
    result.job = replace(
        result.job,
        state=JobState.RECOVERING,
        reason=sequel.reason,
        not_before=now + sequel.delay if sequel.delay else None,
        fresh_from=ended.number + 1 if sequel.from_scratch else view.job.fresh_from,
    )
    result.wake_at = result.job.not_before
    result.events.append(telling.job_event(result.job, now))
    all_go = sequel.action is RetryAction.NEW_SLICES or ended.end_reason is EndReason.SUPERSEDED
    unwanted = {
        tpu_slice.id
        for tpu_slice in view.slices_of(ended)
        if all_go or tpu_slice.state is SliceState.DOOMED
    }
    handing_back.release_job_slices(view, result, now, only=unwanted)


def will_retry(view: JobView, attempt: Attempt, now: datetime) -> bool:
    """Whether another attempt will follow, as far as can be told before this one has ended."""
    if attempt.state is not AttemptState.STOPPING:
        return True
    ended = _ended(view, attempt, now)
    return retries.decide_retry(view.job, ended, (*view.attempts[:-1], ended)).will_retry


def _ended(view: JobView, attempt: Attempt, now: datetime) -> Attempt:
    verdict = verdicts.judge(attempt, view.slices_of(attempt), view.hosts_of(attempt))
    reached = view.progress.checkpoint_step if view.progress else None
    return replace(
        attempt,
        state=AttemptState.ENDED,
        ended_at=now,
        ended_because=verdict.reason,
        words=verdict.message,
        first_host=verdict.failed_host,
        checkpoint_step=reached or attempt.start_step,
        last_step=view.progress.step if view.progress else None,
    )


def _quiet(host: Host, attempt: Attempt) -> bool:
    """The agent said that no process of this attempt is left."""
    return host.attempt_id == attempt.id and host.phase is Phase.EXITED


def _loss_reason(tpu_slice: TpuSlice | None) -> EndReason:
    if tpu_slice is None or tpu_slice.loss is None:
        return EndReason.HOST_LOST
    return {
        LossReason.PREEMPTED: EndReason.PREEMPTED,
        LossReason.MAINTENANCE: EndReason.MAINTENANCE,
        LossReason.OUT_OF_MEMORY: EndReason.OUT_OF_HOST_MEMORY,
    }.get(tpu_slice.loss, EndReason.HOST_LOST)


def _stopping_state(job: Job) -> JobState:
    """While it stops, a job that started is shown as recovering; one that is cancelled stays."""
    return job.state if job.cancel_requested_by else JobState.RECOVERING


def _due(moment: datetime | None, now: datetime) -> bool:
    return moment is not None and moment <= now


def _soonest(*moments: datetime | None) -> datetime | None:
    return min((moment for moment in moments if moment is not None), default=None)
