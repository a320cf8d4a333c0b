"""Validation of identifiers that come from clients and become part of a path or a row."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

from tpufleet.errors import must_be, too_long
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
    "parse_host_id", "parse_job_id",
]  # fmt: skip
T = TypeVar("T", int, timedelta)
SECOND = timedelta(seconds=1)  # the shortest of most durations


def check_range(field: str, value: T, least: T, most: T) -> None:
    """Of numbers, or durations."""
    if not least <= value <= most:
        shown = (to_builtin(x) if isinstance(x, timedelta) else x for x in (least, most, value))
        shortest, longest, given = shown
        raise must_be(f"from {shortest} to {longest}", given, field)


def check_text(field: str, text: str, limit: int) -> str:
    if len(text) > limit or "\0" in text:
        raise too_long(limit, field=field)
    return text
