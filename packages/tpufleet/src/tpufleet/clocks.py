"""Clocks. Everything that needs the current time is passed a clock."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol

_random = random.Random()  # separate, so that seeding the global generator has no effect


class Clock(Protocol):
    def now(self) -> datetime:
        """The current time, in UTC. It can step either way when the machine's clock is set."""
        ...

    def uptime(self) -> timedelta:
        """Time since an arbitrary moment. It never steps."""
        ...


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def uptime(self) -> timedelta:
        return timedelta(seconds=time.monotonic())


class ManualClock:
    """Advances only on request. For tests and simulations."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._now = start
        self._uptime = timedelta(0)

    def now(self) -> datetime:
        return self._now

    def uptime(self) -> timedelta:
        return self._uptime

    def advance(self, by: timedelta) -> None:
        self._now += by
        self._uptime += by

    def step(self, by: timedelta) -> None:
        """The machine's clock is set, forwards or backwards; no time passes."""
        self._now += by


def jittered(seconds: float, minimum: float = 0.5) -> float:
    """Between `minimum` and all of a delay, so that many clients do not retry at once."""
    return seconds * _random.uniform(minimum, 1.0)


def wait_until(condition: Callable[[], bool], seconds: float, interval: float) -> bool:
    """Whether it becomes true within this time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True
