"""How long each fault kept a job from its next step, and with what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from tpufleet.model.job.attempts import Attempt, Recovery, Startup


def recoveries(attempts: Sequence[Attempt]) -> tuple[Recovery, ...]:
    """Of all attempts of a job, those that made a step beyond the earlier ones. Attempts in between
    that made none belong to the same recovery."""
    found = []
    failed: Attempt | None = None  # before which the last new step was made
    last_step = None
    for attempt in attempts:
        advanced = attempt.startup is not None and attempt.startup.advanced_at is not None
        if failed is not None and advanced:
            found.append(_recovery(failed, attempt, last_step))
        if attempt.fault_at is not None and (failed is None or advanced):
            failed = attempt
        last_step = max((each for each in (last_step, attempt.last_step) if each), default=None)
    return tuple(found)


def resumed_step(attempt: Attempt) -> int | None:
    """The step that it started from. A program whose checkpoints are not seen, or that could not
    read the newest, reports its first step after it."""
    first = attempt.startup.first_step if attempt.startup is not None else None
    if first is None or (attempt.start_step is not None and attempt.start_step <= first):
        return attempt.start_step
    return max(0, first - 1)


def _recovery(failed: Attempt, after: Attempt, last_step: int | None) -> Recovery:
    startup = after.startup
    assert startup and startup.advanced_at and failed.fault_at and failed.end_reason
    resumed = resumed_step(after)
    lost = None if resumed is None or last_step is None else max(0, last_step - resumed)
    return Recovery(
        attempt=after.number,
        reason=failed.end_reason,
        fault_at=failed.fault_at,
        seconds=_seconds(failed.fault_at, startup.advanced_at),
        parts={name: taken for name, taken in _parts(failed, after, startup) if taken > 0},
        resumed_step=resumed,
        lost_steps=lost,
    )


def _parts(failed: Attempt, after: Attempt, startup: Startup) -> Iterator[tuple[str, float]]:
    yield "detect", _seconds(failed.fault_at, failed.stopping_at or failed.ended_at)
    yield "stop", _seconds(failed.stopping_at, failed.ended_at)
    yield "slice", _seconds(failed.ended_at, after.created_at)
    yield "agent", _seconds(after.created_at, startup.assigned_at)
    yield "setup", _seconds(startup.assigned_at, startup.started_at)
    yield from program_parts(startup)
    yield "redo", _seconds(startup.stepped_at, startup.advanced_at)


def program_parts(startup: Startup) -> Iterator[tuple[str, float]]:
    """From the start of the command to its first step. Without `tpufleet.runtime` nothing more is
    known than that."""
    left = _seconds(startup.started_at, startup.stepped_at)
    known = {
        "import": _seconds(startup.started_at, startup.imported_at),
        "connect": startup.connect_seconds,
        "restore": startup.restore_seconds,
        "compile": startup.compile_seconds,
    }
    for name, seconds in known.items():
        taken = min(max(seconds, 0.0), left)
        left -= taken
        yield name, taken
    yield "first step" if startup.imported_at else "program", left


def _seconds(since: datetime | None, until: datetime | None) -> float:
    if since is None or until is None:
        return 0.0
    return max(0.0, (until - since).total_seconds())
