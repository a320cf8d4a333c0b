"""Retry, wait or give up after an attempt. A preemption never spends the user's failure budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from tpufleet.model.attempts import Attempt
from tpufleet.model.endings import ENDINGS, Budget, EndReason
from tpufleet.model.jobs import Job
from tpufleet.policy import rules, spreads
from tpufleet.policy.rules import Action

FIRST_WAIT = timedelta(seconds=5)
LONGEST_WAIT = timedelta(minutes=5)

# The hardware went away: nothing about the program is proven by it.
_TAKEN_AWAY = frozenset(
    {EndReason.PREEMPTED, EndReason.MAINTENANCE, EndReason.SUPERSEDED, EndReason.HOST_LOST}
)
# A full disk or a busy device stays so on the same machine.
_NEEDS_OTHER_HARDWARE = frozenset({EndReason.DISK_FULL})


class Follow(StrEnum):
    SUCCEED = "succeed"
    FAIL = "fail"
    CANCEL = "cancel"
    KEEP_SLICES = "keep_slices"  # those that are left; lost ones are replaced
    NEW_SLICES = "new_slices"


@dataclass(frozen=True, kw_only=True, slots=True)
class Next:
    """What follows an ended attempt, and why."""

    follow: Follow
    words: str
    wait: timedelta = timedelta(0)
    fresh: bool = False  # start over: older checkpoints are not loaded
    advice: str = ""

    @property
    def goes_on(self) -> bool:
        return self.follow in (Follow.KEEP_SLICES, Follow.NEW_SLICES)


def after(job: Job, ended: Attempt, history: Sequence[Attempt]) -> Next:
    """What follows `ended`; `history` holds every attempt of the job, `ended` last."""
    reason = ended.ended_because
    assert reason is not None, "only an ended attempt has a sequel"
    ending = ENDINGS[reason]
    if reason is EndReason.FINISHED:
        return Next(follow=Follow.SUCCEED, words=ended.words)
    if reason is EndReason.CANCELLED:
        return Next(follow=Follow.CANCEL, words=f"cancelled by {job.cancel_requested_by}")

    action = rules.action(job.spec.rule, reason)
    if action is Action.PASS:
        left = f"the rule `{job.spec.rule}` leaves this to a person"
        return _fail(ended, left, "`tpu resume JOB` goes on from the last checkpoint")
    if ending.budget is Budget.NONE:
        return _fail(ended, "trying again would end the same way", ending.advice)
    if ending.budget is not Budget.FREE:
        allowed = job.spec.retries.of(ending.budget)
        if spent(history, ending.budget) > allowed:
            used_up = f"retries.{ending.budget} is {allowed}{', and used up' if allowed else ''}"
            return _fail(ended, used_up, ending.advice)
    if (stuck := attempts_without_progress(history)) >= job.spec.crash_loop:
        return _fail(
            ended,
            f"crash loop: {stuck} attempts in a row ended without a newer checkpoint",
            ending.advice,
        )

    # A preempted slice is replaced anyway, and its healthy siblings need not be.
    reapply = action is Action.REAPPLY and reason is not EndReason.PREEMPTED
    other = reapply or reason in _NEEDS_OTHER_HARDWARE
    fresh = action is Action.RERUN
    return Next(
        follow=Follow.NEW_SLICES if other else Follow.KEEP_SLICES,
        words=f"{ending.words}; {'starts over' if fresh else 'goes on from the last checkpoint'}",
        wait=_wait(ended, history),
        fresh=fresh,
    )


def spent(history: Sequence[Attempt], budget: Budget) -> int:
    """How many attempts this budget has paid for."""
    return sum(
        1
        for attempt in history
        if attempt.ended_because and ENDINGS[attempt.ended_because].budget is budget
    )


def attempts_without_progress(history: Sequence[Attempt]) -> int:
    """Attempts at the end of the history that failed by themselves and left no newer checkpoint."""
    stuck = 0
    for attempt in reversed(history):
        if made_progress(attempt):
            break
        if attempt.ended_because and attempt.ended_because not in _TAKEN_AWAY:
            stuck += 1
    return stuck


def made_progress(attempt: Attempt) -> bool:
    if attempt.checkpoint_step is None:
        return False
    return attempt.start_step is None or attempt.checkpoint_step > attempt.start_step


def _wait(ended: Attempt, history: Sequence[Attempt]) -> timedelta:
    if ended.ended_because in _TAKEN_AWAY:
        return timedelta(0)
    return spreads.backoff(
        attempts_without_progress(history), first=FIRST_WAIT, longest=LONGEST_WAIT, key=ended.id
    )


def _fail(ended: Attempt, why: str, advice: str) -> Next:
    assert ended.ended_because is not None
    told = ended.words or ENDINGS[ended.ended_because].words
    return Next(follow=Follow.FAIL, words=f"{told}; {why}", advice=advice)
