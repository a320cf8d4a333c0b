"""Knowing when to stop: SIGTERM came, or the agent wrote the `stop` file."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from tpufleet.runtime.context import context

_told = False  # a plain flag: a signal handler may set it at any moment


def should_stop() -> bool:
    """True once this process was asked to stop: write a checkpoint and leave.

    Without `install_stop_handler` (or `initialize`) SIGTERM ends the process before it can ask.
    """
    if _told:
        return True
    run_dir = context().run_dir
    return run_dir is not None and (run_dir / "stop").exists()


def install_stop_handler() -> bool:
    """Let SIGTERM only be remembered. Answers False outside the main thread, where Python allows
    no handlers; the `stop` file still works there."""
    if threading.current_thread() is not threading.main_thread():
        return False
    before = signal.getsignal(signal.SIGTERM)
    if before is _remember:
        return True
    global _previous
    _previous = before
    signal.signal(signal.SIGTERM, _remember)
    return True


_previous: signal._HANDLER = None


def _remember(number: int, frame: FrameType | None) -> None:
    global _told
    _told = True
    if callable(_previous):
        _previous(number, frame)  # the program's own handler still runs
