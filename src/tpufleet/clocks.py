"""Where time comes from. Everything that needs "now" is handed a clock."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Protocol

_dice = random.Random()  # its own: who seeds Python's, or watches it, is left alone


class Clock(Protocol):
    def now(self) -> datetime:
        """The present moment, in UTC."""
        ...


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)


class ManualClock:
    """Moves only when told to. Tests and simulations run on it."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._now = start

    def now(self) -> datetime:
        return self._now

    def advance(self, by: timedelta) -> None:
        self._now += by


def jittered(seconds: float, minimum: float = 0.5) -> float:
    """`least` to all of a pause, so that many who wait do not come back at the same moment."""
    return seconds * _dice.uniform(minimum, 1.0)
