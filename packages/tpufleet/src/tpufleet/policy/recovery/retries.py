"""Retry, wait or fail after an attempt. Preemptions never count as failures."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from enum import StrEnum

import msgspec

from tpufleet.backoff import BackoffPolicy
from tpufleet.model.job.attempts import Attempt
from tpufleet.model.job.end_reasons import END_REASONS, EndReason, RetryBudget
from tpufleet.model.job.jobs import Job
from tpufleet.policy.recovery import retry_rules
from tpufleet.policy.recovery.retry_rules import RuleAction

RETRY_BACKOFF = BackoffPolicy(first=timedelta(seconds=5), longest=timedelta(minutes=5))

# Longer than compilation and loading take; a program that ran for longer was at work.
EARLY_FAILURE = timedelta(minutes=5)

# The hardware was lost or changed, which proves nothing about the program.
_HARDWARE_LOST = frozenset(
    {
        *(EndReason.PREEMPTED, EndReason.MAINTENANCE, EndReason.SUPERSEDED),
        *(EndReason.HOST_LOST, EndReason.RESIZED),
    }
)
# A full disk stays full on the same machine.
_NEEDS_NEW_SLICES = frozenset({EndReason.DISK_FULL})
# A retry had better have another host than the one that failed.
MAY_BE_OF_HOST = frozenset({EndReason.DISK_FULL, EndReason.DEVICE_BUSY, EndReason.SETUP_FAILED})


class RetryAction(StrEnum):
    SUCCEED = "succeed"
    FAIL = "fail"
    CANCEL = "cancel"
    KEEP_SLICES = "keep_slices"  # the remaining ones; lost ones are replaced
    NEW_SLICES = "new_slices"


class RetryDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What follows an ended attempt, and why."""

    action: RetryAction
    reason: str
    delay: timedelta = timedelta(0)
    from_scratch: bool = False  # do not load older checkpoints
    advice: str = ""

    @property
    def will_retry(self) -> bool:
        return self.action in (RetryAction.KEEP_SLICES, RetryAction.NEW_SLICES)


def decide_retry(job: Job, ended: Attempt, history: Sequence[Attempt]) -> RetryDecision:
    """What follows `ended`; `history` holds every attempt of the job, `ended` last."""
    reason = ended.end_reason
    assert reason is not None, "only an ended attempt can be retried"
    info = END_REASONS[reason]
    if reason is EndReason.FINISHED:
        return RetryDecision(action=RetryAction.SUCCEED, reason=ended.message)
    if reason is EndReason.CANCELLED:  # who did it is said when the job ends
        return RetryDecision(action=RetryAction.CANCEL, reason=ended.message)
    if reason is EndReason.OVER_BUDGET:
        advice = job.advice or info.advice  # set when it was found to be over its limit
        return RetryDecision(action=RetryAction.FAIL, reason=ended.message, advice=advice)

    action = retry_rules.rule_action(job.spec.rule, reason)
    if action is RuleAction.PASS:
        advice = "run `tpu resume JOB` to continue from the last checkpoint"
        return _fail(ended, f"not retried under rule `{job.spec.rule}`", advice)
    if info.budget is RetryBudget.NONE:
        return _fail(ended, "a retry would fail the same way", info.advice)
    if info.budget is not RetryBudget.FREE:
        allowed = job.spec.retries.limit(info.budget)
        if charged_attempts(history, info.budget) > allowed:
            used_up = ", all used" if allowed else ""
            return _fail(ended, f"retries.{info.budget} is {allowed}{used_up}", info.advice)
    if (stuck := attempts_without_progress(history)) >= job.spec.crash_loop:
        return _fail(
            ended,
            f"crash loop: {stuck} consecutive attempts without a newer checkpoint",
            info.advice,
        )

    # A preempted slice is replaced anyway; its healthy siblings are kept.
    reapply = action is RuleAction.REAPPLY and reason is not EndReason.PREEMPTED
    new_slices = reapply or reason in _NEEDS_NEW_SLICES
    from_scratch = action is RuleAction.RERUN
    resumption = "resuming from the last checkpoint"
    if from_scratch:
        resumption = "restarting from scratch"
    elif all(each.checkpoint_step is None for each in (*history, ended)) and job.parent is None:
        resumption = "starting again; no checkpoint was reported"
    return RetryDecision(
        action=RetryAction.NEW_SLICES if new_slices else RetryAction.KEEP_SLICES,
        reason=f"{info.description}; {resumption}",
        delay=_delay(ended, history),
        from_scratch=from_scratch,
    )


def charged_attempts(history: Sequence[Attempt], budget: RetryBudget) -> int:
    """How many attempts were charged to this budget."""
    return sum(
        1
        for attempt in history
        if attempt.end_reason and END_REASONS[attempt.end_reason].budget is budget
    )


def attempts_without_progress(history: Sequence[Attempt]) -> int:
    """Trailing attempts that failed by themselves and left no newer checkpoint.

    Where no checkpoint was ever seen, there may be some in a place or a layout that cannot be read.
    Then only attempts that failed early count, since those cannot have got far.
    """
    stuck = 0
    for attempt in reversed(history):
        if made_progress(attempt):
            break
        seen = attempt.checkpoint_step is not None or attempt.start_step is not None
        if not seen and not _failed_early(attempt):
            break
        if attempt.end_reason and attempt.end_reason not in _HARDWARE_LOST:
            stuck += 1
    return stuck


def made_progress(attempt: Attempt) -> bool:
    if attempt.checkpoint_step is None:
        return False
    return attempt.start_step is None or attempt.checkpoint_step > attempt.start_step


def _failed_early(attempt: Attempt) -> bool:
    """Also true of an attempt that never ran on every host."""
    if attempt.running_at is None or attempt.ended_at is None:
        return True
    return attempt.ended_at - attempt.running_at < EARLY_FAILURE


def _delay(ended: Attempt, history: Sequence[Attempt]) -> timedelta:
    """None after the first failure of a program that ran: most often it does not come again."""
    stuck = attempts_without_progress(history)
    if ended.end_reason in _HARDWARE_LOST or (ended.running_at is not None and stuck <= 1):
        return timedelta(0)
    return RETRY_BACKOFF.delay(stuck, key=ended.id)


def _fail(ended: Attempt, explanation: str, advice: str) -> RetryDecision:
    assert ended.end_reason is not None
    message = ended.message or END_REASONS[ended.end_reason].description
    return RetryDecision(action=RetryAction.FAIL, reason=f"{message}; {explanation}", advice=advice)
