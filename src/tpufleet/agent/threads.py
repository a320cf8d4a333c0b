"""Threads that never die silently."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable


def start(name: str, target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=_loudly, args=(name, target), name=name, daemon=True)
    thread.start()
    return thread


def _loudly(name: str, target: Callable[[], None]) -> None:
    try:
        target()
    except Exception:
        log_exception(f"the thread {name} ended by an error")


def log(words: str) -> None:
    print(f"[tpufleet agent] {words}", file=sys.stderr, flush=True)


def log_exception(words: str) -> None:
    """Tell of the exception being handled, with its traceback."""
    log(f"{words}\n{traceback.format_exc()}")


def uptime() -> float:
    """Seconds that also count while the machine is suspended, so that leases end on time."""
    return time.clock_gettime(_CLOCK)


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
