"""The file `result` that a program may write to its run directory, and its upload."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from tpufleet.agent import threads
from tpufleet.backoff import Backoff
from tpufleet.errors import FleetError, Unreachable

MAX_RESULT_BYTES = 64 * 1024 * 1024
INITIAL_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 1.0


def read_result(path: Path) -> bytes | None:
    """None when there is none to upload. Links, pipes and files that are too large are ignored."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        threads.log(f"ignoring {path}: {error.strerror}")
        return None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_RESULT_BYTES:
        os.close(handle)
        threads.log(f"ignoring {path}: not a regular file of at most {MAX_RESULT_BYTES} bytes")
        return None
    with open(handle, "rb") as file:
        return file.read(MAX_RESULT_BYTES)


def upload_result(send: Callable[[], None], timeout: float, paused: Callable[[], bool]) -> bool:
    """Retry until it is accepted, rejected, or timed out. Time for which `paused` is true, because
    the control plane is unreachable, does not count."""
    deadline = time.monotonic() + timeout
    backoff = Backoff(first=INITIAL_RETRY_SECONDS, longest=MAX_RETRY_SECONDS)
    while True:
        try:
            send()
            return True
        except Unreachable as error:
            threads.log(f"cannot upload the result; retrying: {error}")
        except FleetError as error:
            threads.log(f"the result was rejected: {error}")
            return False
        time.sleep(backoff.failed())
        if paused():
            deadline = time.monotonic() + timeout
        elif time.monotonic() > deadline:
            return False
