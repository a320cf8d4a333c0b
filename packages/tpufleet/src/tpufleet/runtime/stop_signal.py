"""Stop requests: SIGTERM, or the `stop` file that the agent writes."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from tpufleet.runtime.context import context

_sigterm_received = False  # a plain flag, safe to set in a signal handler


def should_stop() -> bool:
    """True once this process was asked to stop: save a checkpoint and exit.

    Without `install_stop_handler` (or `initialize`) SIGTERM kills the process immediately.
    """
    if _sigterm_received:
        return True
    run_dir = context().run_dir
    return run_dir is not None and (run_dir / "stop").exists()


def install_stop_handler() -> bool:
    """Make SIGTERM set a flag instead of killing the process. Returns False outside the main
    thread, where Python allows no handlers; the `stop` file still works there."""
    if threading.current_thread() is not threading.main_thread():
        return False
    current = signal.getsignal(signal.SIGTERM)
    if current is _on_sigterm:
        return True
    global _previous
    _previous = current
    signal.signal(signal.SIGTERM, _on_sigterm)
    return True


_previous: signal._HANDLER = None


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    global _sigterm_received
    _sigterm_received = True
    if callable(_previous):
        _previous(number, frame)  # the program's own handler still runs
