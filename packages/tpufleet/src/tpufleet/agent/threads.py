"""Background threads, stderr logging and the lease clock of the agent."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable

from tpufleet.linux import stderr_rotation


def start(name: str, target: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread that logs the exception it ends with."""
    thread = threading.Thread(target=_run_logged, args=(name, target), name=name, daemon=True)
    thread.start()
    return thread


def _run_logged(name: str, target: Callable[[], None]) -> None:
    try:
        target()
    except Exception:
        log_exception(f"unexpected error in thread {name!r}; it has ended")


def log(message: str) -> None:
    """Never fails: on a full disk the agent goes on without its log."""
    with contextlib.suppress(OSError):
        print(f"[tpufleet agent] {message}", file=sys.stderr, flush=True)
        stderr_rotation.rotate()


def log_exception(message: str) -> None:
    """Log the exception being handled, with its traceback."""
    log(f"{message}\n{traceback.format_exc()}")


def uptime() -> float:
    """Seconds on a clock that also runs during suspend, so that leases expire on time."""
    return time.clock_gettime(_CLOCK)


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
