"""How long the parts of a start take, for the line at the end of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StartTimes:
    """Seconds of each part. Parts overlap, so the whole is less than their sum."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self.began = clock, clock()
        self.parts: dict[str, float] = {}

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self.parts[part] = self.parts.get(part, 0.0) + self._clock() - began
