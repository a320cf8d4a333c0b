"""Zones of the emulated cloud, and how long its operations take."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TypeAlias

from tpufleet.errors import BadInput
from tpufleet.model.tpu import tpu_zones

ZONES = tpu_zones.zones()


@dataclass(frozen=True, kw_only=True, slots=True)
class DurationRange:
    """A duration drawn for each operation, reproducibly by a seed."""

    shortest: timedelta
    longest: timedelta

    def __post_init__(self) -> None:
        if not timedelta(0) <= self.shortest <= self.longest:
            raise BadInput("a range of durations goes from a shorter to a longer one: [30s, 2m]")


Latency: TypeAlias = timedelta | DurationRange


def _seconds(shortest: float, longest: float) -> DurationRange:
    return DurationRange(shortest=timedelta(seconds=shortest), longest=timedelta(seconds=longest))


# Google's guides speak of minutes for a creation and a deletion; users of Spot VMs report 2 to 5
# minutes from a request to ACTIVE.
_BOOT, _DELETION = _seconds(75, 240), _seconds(30, 180)
_STOP, _UPDATE = _seconds(30, 90), _seconds(5, 30)
_STOCKOUT, _QUEUEING = _seconds(1, 20), _seconds(5, 60)


@dataclass(frozen=True, kw_only=True, slots=True)
class Latencies:
    """How long operations of the cloud take."""

    boot: Latency = _BOOT
    deletion: Latency = _DELETION
    stop: Latency = _STOP
    update: Latency = _UPDATE
    stockout: Latency = _STOCKOUT  # until an operation fails for lack of stock
    queueing: Latency = _QUEUEING  # until a queued resource is first considered
    notice_period: Latency = timedelta(seconds=30)  # from a notice to the preemption

    def draw(self, kind: str, seed: int, key: str) -> timedelta:
        """The duration of one operation; the same for the same seed and key."""
        latency: Latency = getattr(self, kind)
        if isinstance(latency, timedelta):
            return latency
        share = random.Random(f"{seed}/{kind}/{key}").random()
        return latency.shortest + share * (latency.longest - latency.shortest)

    def divided_by(self, speed: float) -> Latencies:
        """The same cloud, `speed` times as fast."""
        return Latencies(
            **{item.name: _divided(getattr(self, item.name), speed) for item in fields(self)}
        )


# Every operation is complete at the next call.
IMMEDIATE = Latencies(
    boot=timedelta(0),
    deletion=timedelta(0),
    stop=timedelta(0),
    update=timedelta(0),
    stockout=timedelta(0),
    queueing=timedelta(0),
)


def _divided(latency: Latency, speed: float) -> Latency:
    if isinstance(latency, timedelta):
        return latency / speed
    return DurationRange(shortest=latency.shortest / speed, longest=latency.longest / speed)
