"""Ctrl-C in a program that uses JAX."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Python only reports exceptions of these functions, and goes on: JAX's callback of the garbage
# collector, and finalizers.
SWALLOWING = frozenset({"_xla_gc_callback", "__del__"})
RETRY_SECONDS = 0.05


@contextmanager
def delivered_interrupts() -> Iterator[None]:
    """An interrupt that arrives in a function that would swallow it is sent again."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_name in SWALLOWING:
            main = threading.main_thread().ident
            again = threading.Timer(RETRY_SECONDS, signal.pthread_kill, [main, signal.SIGINT])
            again.daemon = True
            again.start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt
