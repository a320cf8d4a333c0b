"""Where every second went that was paid for: to an attempt, to the start of a slice, to its
release, or to none of these."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from tpufleet.model.fleet.slices import SliceId, TpuSlice
from tpufleet.model.job.attempts import Attempt
from tpufleet_testbed.cloud_tpu.billing import BillingEntry


class Cause(StrEnum):
    RUN = "an attempt runs on it"
    SETUP = "an attempt starts on it"
    BOOT = "until all of its hosts are there"
    GANG = "until the other slices of the gang are there"
    BETWEEN = "between two attempts"
    AFTER = "after its last attempt, until that is known"
    RELEASE = "until it is deleted"
    UNKNOWN = "for nothing that is recorded"


@dataclass(frozen=True, kw_only=True)
class Span:
    """Of one VM."""

    vm: str
    slice_id: SliceId
    cause: Cause
    start: datetime
    end: datetime

    @property
    def length(self) -> timedelta:
        return self.end - self.start


def spans(
    entries: Iterable[tuple[SliceId, BillingEntry]],
    slices: Mapping[SliceId, TpuSlice],
    attempts: Sequence[Attempt],
    now: datetime,
) -> list[Span]:
    """They cover each entry without gaps or overlap."""
    by_slice: dict[SliceId, list[Attempt]] = defaultdict(list)
    for attempt in sorted(attempts, key=lambda each: each.created_at):
        for slice_id in attempt.slices:
            by_slice[slice_id].append(attempt)
    found: list[Span] = []
    for slice_id, entry in entries:
        cursor, end = entry.began_at, entry.ended_at or now
        for until, cause in _phases(slices.get(slice_id), by_slice[slice_id], now):
            until = min(until, end)
            if until > cursor:
                found.append(
                    Span(vm=entry.node, slice_id=slice_id, cause=cause, start=cursor, end=until)
                )
                cursor = until
        assert cursor == end, f"{slice_id} is not accounted for after {cursor}"
    return found


def _phases(
    tpu_slice: TpuSlice | None, attempts: Sequence[Attempt], now: datetime
) -> Iterable[tuple[datetime, Cause]]:
    """Each phase of a slice, and when it ended."""
    forever = now + timedelta(days=1)
    if tpu_slice is None:
        yield forever, Cause.UNKNOWN
        return
    lost = tpu_slice.lost_at or forever
    yield min(tpu_slice.ready_at or lost, lost), Cause.BOOT
    idle = Cause.GANG
    for attempt in attempts:
        yield attempt.created_at, idle
        ended = attempt.ended_at or now
        yield min(attempt.running_at or ended, ended), Cause.SETUP
        yield ended, Cause.RUN
        idle = Cause.BETWEEN
    yield lost, Cause.AFTER if attempts else idle
    if tpu_slice.lost_at is not None:
        yield forever, Cause.RELEASE
    yield forever, Cause.UNKNOWN


def totals(found: Iterable[Span]) -> dict[Cause, timedelta]:
    result: Counter[Cause] = Counter()
    for span in found:
        result[span.cause] += span.length / timedelta(seconds=1)
    return {cause: timedelta(seconds=result[cause]) for cause in Cause}


def longest(found: Iterable[Span], cause: Cause) -> timedelta:
    return max((span.length for span in found if span.cause is cause), default=timedelta(0))


def report(found: Sequence[Span]) -> str:
    by_cause = totals(found)
    paid = sum(by_cause.values(), timedelta(0)) or timedelta(seconds=1)
    return "\n".join(
        f"{time.total_seconds():10.0f} s {time / paid:7.2%}  {cause}, "
        f"at most {longest(found, cause).total_seconds():.0f} s at once"
        for cause, time in by_cause.items()
    )
