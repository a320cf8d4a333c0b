"""The one poller of the tests, for what happens in other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T],
    timeout: float = 60.0,
    describe: Callable[[], object] | object = "",
    interval: float = 0.02,
) -> T:
    """The value of `condition` once it is true. Fails with `describe` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() >= deadline:
            message = describe() if callable(describe) else describe
            raise AssertionError(f"timed out after {timeout:g} s: {message}")
        time.sleep(interval)
    return value
