"""What the time of an attempt went into: steps that count, or one of Google's classes of badput."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

import msgspec

from tpufleet.model.job.attempts import Attempt
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.people.costs import Badput
from tpufleet.model.values.durations import MAX_DURATION
from tpufleet.policy.recovery.recovery_time import program_parts, resumed_step

# Ended on request, or complete.
_WANTED = frozenset(
    {EndReason.FINISHED, EndReason.CANCELLED, EndReason.TIMEOUT, EndReason.OVER_BUDGET}
)
_PROGRAM = {
    "connect": Badput.TPU_INITIALIZATION,
    "restore": Badput.CHECKPOINT_RESTORE,
}


class Span(msgspec.Struct, frozen=True):
    """A time, and the parts of it that went into badput. The rest is useful."""

    begin: datetime
    end: datetime
    badput: dict[Badput, float]  # shares


def spans(
    attempt: Attempt, now: datetime, *, reporting: bool = False, after: Attempt | None = None
) -> list[Span]:
    """From its creation until its end, without gaps. `reporting`: it is live and has reported a
    step. `after`: the next attempt, if known, which tells where the work was continued."""
    end = attempt.ended_at or now
    begin, found = attempt.created_at, []
    for until, badput in _spans(attempt, end, reporting, after):
        until = max(begin, min(until, end))
        if until > begin:
            found.append(Span(begin, until, badput))
        begin = until
    return found


def useful_share(spans: Sequence[Span]) -> float | None:
    """None: not known, since no steps were reported."""
    if any(Badput.UNKNOWN in span.badput for span in spans):
        return None
    total = sum(((span.end - span.begin) for span in spans), timedelta(0))
    useful = sum(
        ((span.end - span.begin) * (1 - sum(span.badput.values())) for span in spans), timedelta(0)
    )
    return useful / total if total else None


def _spans(
    attempt: Attempt, end: datetime, reporting: bool, after: Attempt | None
) -> Iterator[tuple[datetime, dict[Badput, float]]]:
    """Ends of spans that follow each other, and what each went into."""
    startup = attempt.startup
    started = startup.started_at if startup is not None else attempt.running_at
    yield started or end, {before_program(attempt.number): 1.0}
    if started is None:
        return
    finished = attempt.end_reason is EndReason.FINISHED
    stepped = startup.stepped_at if startup is not None else None
    if stepped is None and attempt.last_step is None and not reporting:
        yield end, {} if finished else {Badput.UNKNOWN: 1.0}
        return
    last = (attempt.progress_at or end) if attempt.ended_at is not None else end
    if startup is not None and stepped is not None:
        parts = dict(program_parts(startup))
        first = stepped - min(_before_report(attempt, stepped, last), stepped - started)
        taken = (first - started).total_seconds()
        shares: dict[Badput, float] = {}
        for name, seconds in parts.items():
            kind = _PROGRAM.get(name, Badput.PROGRAM_STARTUP)
            shares[kind] = shares.get(kind, 0.0) + seconds
        known = sum(shares.values())
        # What was known to be no step; the steps before the first report are not among it.
        steps = max(0.0, known - taken)
        shares[Badput.PROGRAM_STARTUP] = max(0.0, shares[Badput.PROGRAM_STARTUP] - steps)
        total = sum(shares.values())
        yield first, {kind: value / total for kind, value in shares.items() if value and total}
        started = first
    running = (last - started).total_seconds()
    saving = min(attempt.save_seconds, running) / running if running > 0 else 0.0
    lost = lost_share(attempt, after) * (1 - saving)
    shares = {Badput.CHECKPOINT_SAVE: saving, Badput.WASTED_PROGRESS: lost}
    yield last, {kind: share for kind, share in shares.items() if share}
    if attempt.ended_at is None:
        return
    if attempt.end_reason in _WANTED:
        yield end, {Badput.OTHER: 1.0}
        return
    fault = attempt.fault_at or attempt.stopping_at or end
    unreported = (fault - last).total_seconds()
    kept_steps = _kept_unreported(attempt, after, running * (1 - saving))
    wasted = 0.0 if _saved_all(attempt, after) else 1 - kept_steps / max(unreported, 1e-6)
    yield fault, {Badput.WASTED_PROGRESS: wasted} if wasted > 0 else {}
    yield end, {Badput.INFRASTRUCTURE_RECOVERY: 1.0}


def before_program(number: int) -> Badput:
    """What an attempt waits for: machines, code and Python environment."""
    return Badput.INFRASTRUCTURE_RECOVERY if number else Badput.OTHER


def _before_report(attempt: Attempt, stepped: datetime, last: datetime) -> timedelta:
    """What the steps up to the first report took, by those after it."""
    startup = attempt.startup
    if startup is None or startup.first_step is None or attempt.last_step is None:
        return timedelta(0)
    later = attempt.last_step - startup.first_step
    if later <= 0:
        return timedelta(0)
    before = startup.first_step - (resumed_step(attempt) or 0)
    seconds = max(0.0, (last - stepped).total_seconds()) / later * max(1, before)
    return timedelta(seconds=min(seconds, MAX_DURATION.total_seconds()))


def _kept_unreported(attempt: Attempt, after: Attempt | None, seconds: float) -> float:
    """What steps took that nobody reported before the fault, and that the next attempt continues
    from. `seconds`: what the steps up to the last report took."""
    kept = resumed_step(after) if after is not None else None
    if kept is None or attempt.last_step is None:
        return 0.0
    done = attempt.last_step - (resumed_step(attempt) or 0)
    return max(0, kept - attempt.last_step) * seconds / done if done > 0 else 0.0


def _saved_all(attempt: Attempt, after: Attempt | None) -> bool:
    """Asked to stop, it saved: also the steps between its last report and the request."""
    asked = attempt.stop_reason is not None and not attempt.aborted
    return asked and _kept_step(attempt, after) >= (attempt.last_step or 0)


def lost_share(attempt: Attempt, after: Attempt | None = None) -> float:
    """The fraction of an ended attempt's steps that came after what was kept of it."""
    if attempt.live or attempt.last_step is None or attempt.end_reason is EndReason.FINISHED:
        return 0.0
    start = resumed_step(attempt) or 0
    done = attempt.last_step - start
    lost = attempt.last_step - _kept_step(attempt, after)
    return min(1.0, max(0.0, lost / done)) if done > 0 else 0.0


def _kept_step(attempt: Attempt, after: Attempt | None) -> int:
    """The next attempt may have found a checkpoint that was never reported."""
    continued = resumed_step(after) if after is not None else None
    return max(resumed_step(attempt) or 0, attempt.checkpoint_step or 0, continued or 0)
