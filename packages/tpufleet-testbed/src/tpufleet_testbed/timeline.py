"""What happens later in an emulated cloud: events in one heap, ordered by time, so that a manual
clock may jump and events still happen in order. Callers hold the lock of the cloud."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from tpufleet.clocks import Clock

Action = Callable[[datetime], None]


@dataclass(order=True, slots=True)
class _Event:
    at: datetime
    sequence: int
    action: Action = field(compare=False)


class Timeline:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._numbers = itertools.count(1)
        self._events: list[_Event] = []

    def run_due(self) -> datetime:
        """Run all due events. Returns the present time."""
        now = self._clock.now()
        while self._events and self._events[0].at <= now:
            due = heapq.heappop(self._events)
            due.action(due.at)
        return now

    def schedule(self, at: datetime, action: Action) -> None:
        heapq.heappush(self._events, _Event(at, next(self._numbers), action))
