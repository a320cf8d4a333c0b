"""Clocks. Everything that needs the current time is passed a clock."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Protocol

_random = random.Random()  # separate, so that seeding the global generator has no effect


class Clock(Protocol):
    def now(self) -> datetime:
        """The current time, in UTC."""
        ...


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)


class ManualClock:
    """Advances only on request. For tests and simulations."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._now = start

    def now(self) -> datetime:
        return self._now

    def advance(self, by: timedelta) -> None:
        self._now += by


def jittered(seconds: float, minimum: float = 0.5) -> float:
    """Between `minimum` and all of a delay, so that many clients do not retry at once."""
    return seconds * _random.uniform(minimum, 1.0)
