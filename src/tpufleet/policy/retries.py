"""Retry, wait or give up after an attempt. A preemption never spends the user's failure budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from tpufleet.model.attempts import Attempt
from tpufleet.model.end_reasons import END_REASONS, Budget, EndReason
from tpufleet.model.jobs import Job
from tpufleet.policy import retry_delay, retry_rules
from tpufleet.policy.retry_rules import RuleAction

INITIAL_BACKOFF = timedelta(seconds=5)
MAX_BACKOFF = timedelta(minutes=5)

# The hardware went away: nothing about the program is proven by it.
_TAKEN_AWAY = frozenset(
    {EndReason.PREEMPTED, EndReason.MAINTENANCE, EndReason.SUPERSEDED, EndReason.HOST_LOST}
)
# A full disk or a busy device stays so on the same machine.
_NEEDS_OTHER_HARDWARE = frozenset({EndReason.DISK_FULL})


class RetryAction(StrEnum):
    SUCCEED = "succeed"
    FAIL = "fail"
    CANCEL = "cancel"
    KEEP_SLICES = "keep_slices"  # those that are left; lost ones are replaced
    NEW_SLICES = "new_slices"


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryDecision:
    """What follows an ended attempt, and why."""

    action: RetryAction
    reason: str
    delay: timedelta = timedelta(0)
    from_scratch: bool = False  # start over: older checkpoints are not loaded
    advice: str = ""

    @property
    def will_retry(self) -> bool:
        return self.action in (RetryAction.KEEP_SLICES, RetryAction.NEW_SLICES)


def decide_retry(job: Job, ended: Attempt, history: Sequence[Attempt]) -> RetryDecision:
    """What follows `ended`; `history` holds every attempt of the job, `ended` last."""
    reason = ended.end_reason
    assert reason is not None, "only an ended attempt has a sequel"
    ending = END_REASONS[reason]
    if reason is EndReason.FINISHED:
        return RetryDecision(action=RetryAction.SUCCEED, reason=ended.message)
    if reason is EndReason.CANCELLED:
        return RetryDecision(
            action=RetryAction.CANCEL, reason=f"cancelled by {job.cancel_requested_by}"
        )

    action = retry_rules.rule_action(job.spec.rule, reason)
    if action is RuleAction.PASS:
        left = f"the rule `{job.spec.rule}` leaves this to a person"
        return _fail(ended, left, "`tpu resume JOB` goes on from the last checkpoint")
    if ending.budget is Budget.NONE:
        return _fail(ended, "trying again would end the same way", ending.advice)
    if ending.budget is not Budget.FREE:
        allowed = job.spec.retries.limit(ending.budget)
        if charged_attempts(history, ending.budget) > allowed:
            used_up = f"retries.{ending.budget} is {allowed}{', and used up' if allowed else ''}"
            return _fail(ended, used_up, ending.advice)
    if (stuck := attempts_without_progress(history)) >= job.spec.crash_loop:
        return _fail(
            ended,
            f"crash loop: {stuck} attempts in a row ended without a newer checkpoint",
            ending.advice,
        )

    # A preempted slice is replaced anyway, and its healthy siblings need not be.
    reapply = action is RuleAction.REAPPLY and reason is not EndReason.PREEMPTED
    other = reapply or reason in _NEEDS_OTHER_HARDWARE
    fresh = action is RuleAction.RERUN
    return RetryDecision(
        action=RetryAction.NEW_SLICES if other else RetryAction.KEEP_SLICES,
        reason=f"{ending.description}; {'starts over' if fresh else 'goes on from the last checkpoint'}",
        delay=_wait(ended, history),
        from_scratch=fresh,
    )


def charged_attempts(history: Sequence[Attempt], budget: Budget) -> int:
    """How many attempts this budget has paid for."""
    return sum(
        1
        for attempt in history
        if attempt.end_reason and END_REASONS[attempt.end_reason].budget is budget
    )


def attempts_without_progress(history: Sequence[Attempt]) -> int:
    """Attempts at the end of the history that failed by themselves and left no newer checkpoint."""
    stuck = 0
    for attempt in reversed(history):
        if made_progress(attempt):
            break
        if attempt.end_reason and attempt.end_reason not in _TAKEN_AWAY:
            stuck += 1
    return stuck


def made_progress(attempt: Attempt) -> bool:
    if attempt.checkpoint_step is None:
        return False
    return attempt.start_step is None or attempt.checkpoint_step > attempt.start_step


def _wait(ended: Attempt, history: Sequence[Attempt]) -> timedelta:
    if ended.end_reason in _TAKEN_AWAY:
        return timedelta(0)
    return retry_delay.retry_delay(
        attempts_without_progress(history),
        initial=INITIAL_BACKOFF,
        maximum=MAX_BACKOFF,
        key=ended.id,
    )


def _fail(ended: Attempt, why: str, advice: str) -> RetryDecision:
    assert ended.end_reason is not None
    told = ended.message or END_REASONS[ended.end_reason].description
    return RetryDecision(action=RetryAction.FAIL, reason=f"{told}; {why}", advice=advice)
