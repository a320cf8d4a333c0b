"""The small file `result` that a program may leave in its run folder, and its way to the server."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from tpufleet.agent import threads
from tpufleet.errors import FleetError, Unreachable

LARGEST = 64 * 1024 * 1024
SLOWEST_RETRY_SECONDS = 1.0


def read_result(path: Path) -> bytes | None:
    """None when there is none that we would send: a link, a pipe or too large a file is not."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        threads.log(f"{path} is no result: {error.strerror}")
        return None
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST:
        os.close(handle)
        threads.log(f"{path} is no file of at most {LARGEST} bytes, so it is no result")
        return None
    with open(handle, "rb") as file:
        return file.read(LARGEST)


def upload_result(send: Callable[[], None], patience: float, excused: Callable[[], bool]) -> bool:
    """Try until it is taken or refused, for as long as our patience lasts. Time in which we are
    excused, because the control plane is away altogether, does not count."""
    deadline, pause = time.monotonic() + patience, 0.1
    while True:
        try:
            send()
            return True
        except Unreachable as error:
            threads.log(f"the result is kept back: {error}")
        except FleetError as error:
            threads.log(f"the result was refused: {error}")
            return False
        time.sleep(pause)
        pause = min(pause * 2, SLOWEST_RETRY_SECONDS)
        if excused():
            deadline = time.monotonic() + patience
        elif time.monotonic() > deadline:
            return False
