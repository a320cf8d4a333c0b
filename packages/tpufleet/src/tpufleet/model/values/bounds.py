"""Bounds of numbers, durations and dates that come from outside, so that no sum of them overflows
and any database and any JSON reader can hold them."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar

import msgspec

from tpufleet.errors import BadInput
from tpufleet.model.values.durations import MAX_DURATION

T = TypeVar("T")

MAX_NUMBER = 2**53  # the largest that every JSON reader represents exactly
# What programs of users report. Both are checked when they are decoded.
StepNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_DURATION.total_seconds())]
FIRST_DATE = datetime(1970, 1, 1, tzinfo=UTC)
LAST_DATE = datetime(2500, 1, 1, tzinfo=UTC)


def check_bounds(value: T, path: str = "") -> T:
    """The value itself. Raises BadInput that names the field."""
    match value:
        case bool() | str() | bytes() | None:
            pass
        case int() | float():
            _check(path, -MAX_NUMBER <= value <= MAX_NUMBER, "-2^53", "2^53")
        case timedelta():
            _check(path, -MAX_DURATION <= value <= MAX_DURATION, "0s", "3650d")
        case datetime():
            moment = value if value.tzinfo else value.replace(tzinfo=UTC)
            _check(path, FIRST_DATE <= moment <= LAST_DATE, "1970", "2500")
        case dict():
            for key, item in value.items():
                check_bounds(item, _join(path, key))
        case list() | tuple() | set() | frozenset():
            for number, item in enumerate(value):
                check_bounds(item, _join(path, number))
        case _ if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                check_bounds(getattr(value, field.name), _join(path, field.name))
        case msgspec.Struct():
            for name in value.__struct_fields__:
                check_bounds(getattr(value, name), _join(path, name))
    return value


def _check(path: str, valid: bool, least: str, most: str) -> None:
    if not valid:
        raise BadInput(f"{path}: must be from {least} to {most}")


def _join(path: str, name: Any) -> str:
    name = str(name)[:40]
    return f"{path}.{name}" if path else name
