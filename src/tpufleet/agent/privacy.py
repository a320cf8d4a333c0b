"""Keeps what this process knows from others of the same user."""

from __future__ import annotations

import ctypes

PR_SET_DUMPABLE = 4


def close_memory() -> None:
    """No process of the same user may look into the memory of this one, or trace it. Programs that
    it starts are open again."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot close this process to others")
