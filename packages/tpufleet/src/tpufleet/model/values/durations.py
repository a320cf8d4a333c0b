"""Durations in text: `90s`, `15m`, `1h30m`, `2d`, seconds, or `none`."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import msgspec

from tpufleet import schema
from tpufleet.errors import BadInput, invalid, must_be

MAX_DURATION = timedelta(days=3650)
FORMAT_HINT = "90s, 15m, 2h, 1d, 1h30m or a number of seconds"

_NUMBER = r"([0-9]{1,12}(?:\.[0-9]{1,6})?)"
_SPAN = re.compile(rf"(?:{_NUMBER}d)?(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s)?")
_BARE = re.compile(_NUMBER)
_LONG_UNIT = re.compile(r"([0-9])(days?|hours?|hrs?|h|minutes?|mins?|seconds?|secs?)(?![a-z])")
_SECONDS = (86400, 3600, 60, 1)


def within(least: int = 0, most: timedelta = MAX_DURATION, *, finite: bool = False) -> msgspec.Meta:
    """Of a field: `Annotated[timedelta | None, durations.within(least=1)]`. If it
    is `finite`, or without `| None`, it cannot be `none`. `least` is in seconds."""

    def check(value: Any) -> timedelta | None:
        span = parse(value)
        if span is None and finite:
            raise BadInput("cannot be none; leave it out for the default")
        if span is not None and not timedelta(seconds=least) <= span <= most:
            shortest = to_builtin(timedelta(seconds=least))
            raise must_be(f"from {shortest} to {to_builtin(most)}", to_builtin(span))
        return span

    written = {"type": ["string", "number"], "minimum": least}
    return schema.custom("duration", check, written, write=to_builtin)


def parse(value: Any) -> timedelta | None:
    """None for `none`; otherwise a duration of zero or more."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _not_a_duration(value)
    elif isinstance(value, str):
        text = value.replace(" ", "").lower()
        if re.search(r"[0-9] *M$", value):
            raise _not_a_duration(value, "1m for a minute, 30d for a month")
        if text == "none":
            return None
        seconds = _seconds_in(text, value)
    else:
        seconds = value
    if not 0 <= seconds <= MAX_DURATION.total_seconds():  # neither is NaN
        raise BadInput("must be from zero to ten years; write none for no limit")
    return timedelta(seconds=seconds)


def _seconds_in(text: str, original: str) -> float:
    if _BARE.fullmatch(text):
        return float(text)
    match = _SPAN.fullmatch(text)
    if not text or match is None:
        shorter = _LONG_UNIT.sub(lambda match: match[1] + match[2][0], text)
        hint = shorter if shorter and _SPAN.fullmatch(shorter) else FORMAT_HINT
        raise _not_a_duration(original, hint)
    parts = zip(match.groups(), _SECONDS, strict=True)
    return sum(float(amount) * seconds for amount, seconds in parts if amount)


def _not_a_duration(value: Any, hint: str = FORMAT_HINT) -> BadInput:
    return invalid(value, "a duration", hint)


def to_builtin(span: timedelta | None) -> str | float:
    """A value that `parse` parses into the same duration."""
    if span is None:
        return "none"
    if span < timedelta(0):
        return f"-{to_builtin(-span)}"
    if span.microseconds:
        return span.total_seconds()
    rest = int(span.total_seconds())
    text = ""
    for unit, seconds in zip("dhms", _SECONDS, strict=True):
        amount, rest = divmod(rest, seconds)
        text += f"{amount}{unit}" if amount else ""
    return text or "0s"


def nor_a_date(problem: object) -> BadInput:
    """Where a date may be written too."""
    return BadInput(f"{problem}; or a date such as 2026-01-31")
