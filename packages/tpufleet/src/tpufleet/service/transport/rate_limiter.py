"""Rate limits per user, per slice token, and per address for requests without a valid token."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from tpufleet.errors import Unreachable
from tpufleet.policy.accounting import rate_limits
from tpufleet.policy.accounting.rate_limits import RateLimit, TokenBucket

_MAX_REMEMBERED = 100_000
_VALID_FOR = timedelta(minutes=10)


V = TypeVar("V")


def monotonic_now() -> datetime:
    """Not the time of day: a clock step must neither block callers nor free them."""
    return datetime.fromtimestamp(time.monotonic(), UTC)


class TooManyRequests(Unreachable):
    """The caller sends more requests than its limit."""

    def __init__(self, message: str, retry_after: timedelta) -> None:
        self.retry_after_seconds = max(1, math.ceil(retry_after.total_seconds()))
        super().__init__(f"{message}; retry in {self.retry_after_seconds} s")


class RateLimiter:
    """Used in the event loop only. The least recently used callers are forgotten first."""

    def __init__(self, now: Callable[[], datetime] = monotonic_now) -> None:
        self._now = now
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        self._valid: OrderedDict[str, datetime] = OrderedDict()  # token hash → last accepted

    def check_caller(self, caller: str, limit: RateLimit) -> None:
        """Before a request of this caller is handled."""
        self._take(f"caller:{caller}", limit, "too many requests")

    def check_address(self, address: str, token_hash: str) -> None:
        """Before a token is looked up: strangers must not keep the database busy. A token that was
        valid a moment ago is let through, whoever else uses the same address."""
        last, now = self._valid.get(token_hash), self._now()
        if last is not None and now - last <= _VALID_FOR:
            return
        bucket = self._buckets.get(f"address:{address}")
        if bucket is not None:
            _, wait = rate_limits.take(bucket, rate_limits.PER_STRANGER, now)
            if wait is not None:
                raise TooManyRequests(
                    f"too many requests without a valid token from {address}", wait
                )

    def accept(self, token_hash: str) -> None:
        _keep(self._valid, token_hash, self._now())

    def reject(self, address: str, token_hash: str) -> None:
        """A request without a valid token was received from this address."""
        self._valid.pop(token_hash, None)
        key = f"address:{address}"
        bucket, _ = rate_limits.take(self._buckets.get(key), rate_limits.PER_STRANGER, self._now())
        _keep(self._buckets, key, bucket)

    def _take(self, key: str, limit: RateLimit, message: str) -> None:
        bucket, wait = rate_limits.take(self._buckets.get(key), limit, self._now())
        _keep(self._buckets, key, bucket)
        if wait is not None:
            raise TooManyRequests(message, wait)


def _keep(cache: OrderedDict[str, V], key: str, value: V) -> None:
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > _MAX_REMEMBERED:
        cache.popitem(last=False)
