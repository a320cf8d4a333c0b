"""The one poller of the tests, for what happens in other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Patience:
    """So many seconds of a machine that runs. While it stands still, as virtual machines may do for
    minutes, nothing can happen."""

    longest_look = 5.0

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._looked_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        now = time.monotonic()
        self._left -= min(now - self._looked_at, self.longest_look)
        self._looked_at = now
        return self._left <= 0


def wait_until(
    condition: Callable[[], T],
    timeout: float = 60.0,
    describe: Callable[[], object] | object = "",
    interval: float = 0.02,
) -> T:
    """The value of `condition` once it is true. Fails with `describe` after `timeout` seconds."""
    patience = Patience(timeout)
    while not (value := condition()):
        if patience.is_over:
            message = describe() if callable(describe) else describe
            raise AssertionError(f"timed out after {timeout:g} s: {message}")
        time.sleep(interval)
    return value
