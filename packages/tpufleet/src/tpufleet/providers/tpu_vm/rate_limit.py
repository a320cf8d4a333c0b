"""Rate limit of one zone: halves on RateLimited, and stops while calls hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tpufleet.errors import ProviderUnavailable, RateLimited

MAX_RATE, INITIAL_RATE, MIN_RATE = 50.0, 20.0, 0.2  # creates per second
RATE_INCREASE = 0.5
BURST_SECONDS = 2.0
# No more calls to a zone with this many calls that take longer than this.
MAX_HANGING_CALLS, HANGING_AFTER = 4, 3.0


class ZoneRateLimit:
    """Token bucket with additive increase and multiplicative decrease."""

    def __init__(self, zone: str, now: Callable[[], float] = time.monotonic) -> None:
        self._zone = zone
        self._now = now
        self._lock = threading.Lock()
        self.rate = INITIAL_RATE
        self._tokens = INITIAL_RATE * BURST_SECONDS
        self._filled_at = now()
        self._started: dict[int, float] = {}
        self._calls = 0

    @contextmanager
    def track_create(self) -> Iterator[None]:
        """Around each create, whose answer changes the rate. RateLimited if there is no token."""
        self._take_token()
        try:
            with self.track_call():
                yield
        except RateLimited:
            with self._lock:
                self.rate = max(MIN_RATE, self.rate / 2)
                self._tokens = 0
            raise
        with self._lock:
            self.rate = min(MAX_RATE, self.rate + RATE_INCREASE)

    def _take_token(self) -> None:
        with self._lock:
            now = self._now()
            burst = max(1.0, self.rate * BURST_SECONDS)
            self._tokens = min(burst, self._tokens + (now - self._filled_at) * self.rate)
            self._filled_at = now
            if self._tokens < 1:
                raise RateLimited(
                    f"{self._zone} is limited to {self.rate:.2g} creates/s after rate limit errors"
                )
            self._tokens -= 1

    @contextmanager
    def track_call(self) -> Iterator[None]:
        """Around each call. ProviderUnavailable at once while the zone hangs."""
        with self._lock:
            now = self._now()
            hanging = sum(now - started > HANGING_AFTER for started in self._started.values())
            if hanging >= MAX_HANGING_CALLS:
                raise ProviderUnavailable(f"{hanging} calls to {self._zone} hang; not sending more")
            self._calls += 1
            number = self._calls
            self._started[number] = now
        try:
            yield
        finally:
            with self._lock:
                del self._started[number]
