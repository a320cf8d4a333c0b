"""How long operations of an emulated cloud take: fixed, or drawn reproducibly by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Annotated, Any, Self, TypeAlias, TypeVar

from msgspec import Meta

from tpufleet import schema
from tpufleet.errors import BadInput
from tpufleet_testbed import plan_files
from tpufleet_testbed.faults import Duration


@dataclass(frozen=True, kw_only=True, slots=True)
class DurationRange:
    """A duration drawn for each operation, reproducibly by a seed."""

    shortest: timedelta
    longest: timedelta

    def __post_init__(self) -> None:
        if not timedelta(0) <= self.shortest <= self.longest:
            raise BadInput("a range of durations goes from a shorter to a longer one: [30s, 2m]")


Latency: TypeAlias = timedelta | DurationRange
T = TypeVar("T", bound="LatencyTable")
Range: Any = Annotated[tuple[Duration, ...], Meta(min_length=2, max_length=2)]


def seconds(shortest: float, longest: float) -> DurationRange:
    return DurationRange(shortest=timedelta(seconds=shortest), longest=timedelta(seconds=longest))


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyTable:
    """Each field is a kind of operation."""

    def draw(self, kind: str, seed: int, key: str) -> timedelta:
        """The duration of one operation; the same for the same seed and key."""
        latency: Latency = getattr(self, kind)
        if isinstance(latency, timedelta):
            return latency
        share = random.Random(f"{seed}/{kind}/{key}").random()
        return latency.shortest + share * (latency.longest - latency.shortest)

    def divided_by(self, speed: float) -> Self:
        """The same cloud, `speed` times as fast."""
        return type(self)(
            **{item.name: _divided(getattr(self, item.name), speed) for item in fields(self)}
        )


def parser(table: type[T]) -> Callable[[Any], T]:
    """Of a mapping in a plan: durations by operation, or ranges such as [30s, 2m]."""
    by_operation: Any = Mapping[
        Annotated[str, plan_files.one_of("operation", [item.name for item in fields(table)])],
        Annotated[Latency, schema.custom("duration or range", _latency)],
    ]
    return lambda value: table(**schema.parse(by_operation, value))


def _latency(value: Any) -> Latency:
    if not isinstance(value, list):
        return schema.parse(Duration, value)
    shortest, longest = schema.parse(Range, value)
    return DurationRange(shortest=shortest, longest=longest)


def _divided(latency: Latency, speed: float) -> Latency:
    if isinstance(latency, timedelta):
        return latency / speed
    return DurationRange(shortest=latency.shortest / speed, longest=latency.longest / speed)
