"""Validation of identifiers that come from clients and become part of a path or a row."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from datetime import timedelta
from typing import TypeVar

from tpufleet.errors import BadInput
from tpufleet.model.identifiers import (
    check_secret_name,
    check_user_name,
    parse_attempt_id,
    parse_host_id,
    parse_job_id,
)
from tpufleet.model.values.durations import to_builtin

__all__ = [
    "check_range", "check_secret_name", "check_text", "check_user_name", "parse_attempt_id",
    "parse_host_id", "parse_job_id", "suggestion",
]  # fmt: skip
T = TypeVar("T", int, timedelta)
SECOND = timedelta(seconds=1)  # the shortest of most durations


def check_range(field: str, value: T, least: T, most: T) -> None:
    """Of numbers, or durations."""
    if not least <= value <= most:
        shown = (to_builtin(x) if isinstance(x, timedelta) else x for x in (least, most, value))
        raise BadInput("{}: must be from {} to {}, not {}".format(field, *shown))


def check_text(field: str, text: str, limit: int) -> str:
    if len(text) > limit or "\0" in text:
        raise BadInput(f"{field}: must be at most {limit} characters, without null characters")
    return text


def suggestion(name: str, known: Iterable[str]) -> str:
    """Text to append to an error: `; did you mean …?`, or the known names, or nothing."""
    known = sorted(known)
    close = difflib.get_close_matches(name[:60], known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(known[:10])}" if known else ""
