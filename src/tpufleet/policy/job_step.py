"""What a step reads and what it writes: a job with all that belongs to it, and what changes.

Letting go: of one slice, of what a job no longer needs, and of everything when a job ends.

Following a live attempt until every process of it is known to be gone. Only then has it
ended, and what follows is decided.

The next step of one job, from everything known about it. The heart of a tick.

A job without a live attempt gets one when its whole gang is ready; a live attempt is followed
(`following`) until it has ended, and only then may the next start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from tpufleet.model.attempts import Attempt, AttemptState, attempt_id
from tpufleet.model.end_reasons import EndReason
from tpufleet.model.events import Event
from tpufleet.model.hosts import Host, Phase, Progress
from tpufleet.model.jobs import Job, JobState
from tpufleet.model.slices import LossReason, SliceId, SliceState, TpuSlice
from tpufleet.policy import events, liveness, retries, verdicts
from tpufleet.policy.events import slice_event
from tpufleet.policy.retries import RetryAction, RetryDecision

USABLE_STATES = frozenset({SliceState.REQUESTED, SliceState.BOOTING, SliceState.READY})


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """A job and all that belongs to it."""

    job: Job
    attempts: tuple[Attempt, ...] = ()
    slices: Mapping[SliceId, TpuSlice] = field(default_factory=dict)  # held, or of its attempt
    hosts: Mapping[SliceId, tuple[Host, ...]] = field(default_factory=dict)
    progress: Progress | None = None  # newest of the live attempt

    @property
    def attempt(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts and self.attempts[-1].live else None

    @property
    def usable_slices(self) -> tuple[TpuSlice, ...]:
        """Slices held by the job that work, or will."""
        return tuple(
            tpu_slice
            for tpu_slice in self.slices.values()
            if tpu_slice.job_id == self.job.id and tpu_slice.state in USABLE_STATES
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
        """Everything as the view shows it."""
        same_attempt = self.attempt is None or self.attempt is view.attempt
        return self.job is view.job and same_attempt and not self.slices


def release_slice(tpu_slice: TpuSlice, loss: LossReason, reason: str, now: datetime) -> TpuSlice:
    """Give a slice up: it is to be deleted, whatever is left of it."""
    return replace(
        tpu_slice,
        state=SliceState.RELEASING,
        loss=loss,
        reason=reason,
        lost_at=tpu_slice.lost_at or now,
    )


def release_job_slices(
    view: JobView, result: Step, now: datetime, only: set[SliceId] | None = None
) -> Step:
    """Hand slices back: to their pool if they are healthy and quiet, else to the provider."""
    changed = {tpu_slice.id: tpu_slice for tpu_slice in result.slices}
    for slice_id, before in view.slices.items():
        tpu_slice = changed.get(slice_id, before)
        if tpu_slice.job_id != view.job.id or (only is not None and slice_id not in only):
            continue
        if tpu_slice.state in (SliceState.RELEASING, SliceState.GONE):
            continue
        if tpu_slice.pool and tpu_slice.state is not SliceState.DOOMED:
            freed = replace(tpu_slice, job_id=None, idle_since=now, reason="free")
        else:
            freed = release_slice(
                tpu_slice, tpu_slice.loss or LossReason.RELEASED, "no longer needed", now
            )
            result.events.append(events.slice_event(freed, now))
        changed[slice_id] = freed
    result.slices = list(changed.values())
    return result


def end_job(
    view: JobView, result: Step, state: JobState, end_reason: EndReason, now: datetime
) -> Step:
    """The job is over: say so, and hand everything back."""
    reason = result.job.reason
    if state is JobState.CANCELLED:
        reason = f"cancelled by {view.job.cancel_requested_by}"
    result.job = replace(
        result.job,
        state=state,
        reason=reason,
        ended_at=now,
        ended_because=end_reason,
        not_before=None,
    )
    result.events.append(events.job_event(result.job, now))
    result.wake_at = None
    return release_job_slices(view, result, now)


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
        result.events.append(events.attempt_event(result.attempt, cause or "failing", words, now))
        return
    if (
        everybody
        and attempt.state is AttemptState.STARTING
        and all(host.phase in (Phase.RUNNING, Phase.EXITED) for host in reporting)
    ):
        words = f"attempt {attempt.number} runs on {events.count_of(len(hosts), 'host')}"
        result.attempt = attempt = replace(attempt, state=AttemptState.RUNNING, running_at=now)
        result.job = replace(view.job, state=JobState.RUNNING, reason=words)
        result.events.append(events.attempt_event(attempt, AttemptState.RUNNING, words, now))
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


def _give_up_stubborn_slices(view: JobView, attempt: Attempt, result: Step, now: datetime) -> None:
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
            lost = release_slice(tpu_slice, tpu_slice.loss or LossReason.HOST_LOST, words, now)
            result.slices.append(lost)
            result.events.append(events.slice_event(lost, now))


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
    result.events.append(events.attempt_event(ended, ended.end_reason, words, now))
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
    end_job(view, result, states[sequel.action], ended.end_reason, now)


def _go_on(
    view: JobView, ended: Attempt, sequel: RetryDecision, result: Step, now: datetime
) -> None:
    result.job = replace(
        result.job,
        state=JobState.RECOVERING,
        reason=sequel.reason,
        not_before=now + sequel.delay if sequel.delay else None,
        fresh_from=ended.number + 1 if sequel.from_scratch else view.job.fresh_from,
    )
    result.wake_at = result.job.not_before
    result.events.append(events.job_event(result.job, now))
    all_go = sequel.action is RetryAction.NEW_SLICES or ended.end_reason is EndReason.SUPERSEDED
    unwanted = {
        tpu_slice.id
        for tpu_slice in view.slices_of(ended)
        if all_go or tpu_slice.state is SliceState.DOOMED
    }
    release_job_slices(view, result, now, only=unwanted)


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


__all__ = [
    "JobView",
    "Step",
    "fail_job",
    "release_slice",
    "missing_slices",
    "slice_event",
    "next_step",
]


def next_step(view: JobView, now: datetime) -> Step:
    """One step; calling it again with its own result changes nothing more."""
    if view.job.ended:
        return release_job_slices(view, Step(job=view.job), now)
    if view.attempt is None:
        return _prepare(view, now)
    return follow_attempt(view, view.attempt, now)


def missing_slices(view: JobView, now: datetime) -> int:
    """How many slices to look for now. A doomed slice is replaced before it is gone."""
    job = view.job
    if job.ended or job.cancel_requested_by or (job.not_before and job.not_before > now):
        return 0
    if view.attempt is not None and not will_retry(view, view.attempt, now):
        return 0
    return max(0, job.spec.slices - len(view.usable_slices))


def _prepare(view: JobView, now: datetime) -> Step:
    job = view.job
    if job.cancel_requested_by:
        result = Step(job=job)
        return end_job(view, result, JobState.CANCELLED, EndReason.CANCELLED, now)
    result = Step(job=job, wake_at=job.not_before if _later(job.not_before, now) else None)
    for tpu_slice in view.slices.values():
        if tpu_slice.state is SliceState.DOOMED and tpu_slice.job_id == job.id:
            result.slices.append(
                release_slice(
                    tpu_slice, tpu_slice.loss or LossReason.PREEMPTED, tpu_slice.reason, now
                )
            )
    gang = view.usable_slices
    ready = [tpu_slice for tpu_slice in gang if tpu_slice.state is SliceState.READY]
    if len(ready) >= job.spec.slices and not _later(job.not_before, now):
        return _start(view, result, ready[: job.spec.slices], now)
    if job.state in (JobState.QUEUED, JobState.WAITING):
        state = JobState.WAITING if gang else JobState.QUEUED
        if gang and (state is not job.state or job.reason != _waiting_words(gang)):
            result.job = replace(job, state=state, reason=_waiting_words(gang))
        elif not gang and job.state is JobState.WAITING:
            result.job = replace(job, state=state, reason="looks for capacity")
        if result.job.state is not job.state:
            result.events.append(events.job_event(result.job, now))
    elif job.state is JobState.RECOVERING and gang and job.reason != _waiting_words(gang):
        result.job = replace(job, reason=_waiting_words(gang))
    return result


def _start(view: JobView, result: Step, gang: list[TpuSlice], now: datetime) -> Step:
    """A new attempt on a whole gang. Slices keep the order they were asked for in."""
    job = view.job
    gang.sort(key=lambda tpu_slice: (tpu_slice.requested_at, tpu_slice.id))
    number = len(view.attempts)
    steps = [
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
        start_step=max(steps, default=None),
    )
    where = ", ".join(sorted({f"{item.zone} ({item.capacity})" for item in gang}))
    words = f"attempt {number} starts on {len(gang)} × {job.spec.accelerator} in {where}"
    result.job = replace(job, state=JobState.STARTING, reason=words, not_before=None)
    result.attempt = attempt
    result.events.append(events.attempt_event(attempt, AttemptState.STARTING, words, now))
    result.wake_at = None
    return result


def fail_job(view: JobView, reason: str, advice: str, now: datetime) -> Step:
    """End a job that can never be placed."""
    job = replace(view.job, reason=reason, advice=advice)
    return end_job(view, Step(job=job), JobState.FAILED, EndReason.SETUP_FAILED, now)


def _waiting_words(gang: tuple[TpuSlice, ...]) -> str:
    ready = sum(1 for tpu_slice in gang if tpu_slice.state is SliceState.READY)
    where = ", ".join(sorted({f"{item.zone} ({item.capacity})" for item in gang}))
    return f"waits for slices in {where}: {ready} of {len(gang)} ready"


def _later(moment: datetime | None, now: datetime) -> bool:
    return moment is not None and moment > now
