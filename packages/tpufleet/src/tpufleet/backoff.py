"""Exponential backoff with a cap and jitter: the only implementation in tpufleet."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from tpufleet.clocks import jittered

# Doubling stops mattering long before this: 2**30 seconds is 34 years.
_MOST_DOUBLINGS = 30


@dataclass(frozen=True, kw_only=True)
class BackoffPolicy:
    """How long to wait after the n-th consecutive failure: first, 2 x first, ... up to longest."""

    first: timedelta
    longest: timedelta
    jitter: float = 0.2

    def ceiling(self, failures: int) -> timedelta:
        """The delay without jitter. `failures` counts from 1; 0 means the same as 1."""
        return min(self.first * 2 ** min(max(failures - 1, 0), _MOST_DOUBLINGS), self.longest)

    def delay(self, failures: int, *, key: str) -> timedelta:
        """The ceiling, give or take `jitter`. Pure: a decision made twice is the same decision."""
        draw = zlib.crc32(f"{key}#{failures}".encode()) / 0xFFFFFFFF
        return self.ceiling(failures) * (1 + self.jitter * (2 * draw - 1))


class Backoff:
    """Counts consecutive failures of one operation and gives the next delay in seconds."""

    def __init__(
        self,
        *,
        first: float,
        longest: float,
        jitter: Callable[[float], float] = jittered,
    ) -> None:
        self._policy = BackoffPolicy(
            first=timedelta(seconds=first), longest=timedelta(seconds=longest)
        )
        self._jitter = jitter
        self.failures = 0

    def failed(self) -> float:
        """Record a failure; return how many seconds to wait before the next try."""
        self.failures += 1
        return self._jitter(self._policy.ceiling(self.failures).total_seconds())

    def succeeded(self) -> None:
        self.failures = 0
