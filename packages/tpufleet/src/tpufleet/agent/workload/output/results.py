"""The file `result` that a program may write to its run directory, and its upload."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tpufleet.agent import threads
from tpufleet.agent.workload import untrusted_files
from tpufleet.backoff import Backoff
from tpufleet.errors import FleetError, Unreachable
from tpufleet.model.values.redaction import Redactor

RESULT_FILE = "run/result"
MAX_RESULT_BYTES = 64 * 1024 * 1024
INITIAL_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 1.0


def read_result(attempt_folder: Path) -> bytes | None:
    """None when there is none to upload. Links, pipes and files that are too large are ignored."""
    try:
        return untrusted_files.read_below(attempt_folder, RESULT_FILE, MAX_RESULT_BYTES)[1]
    except FileNotFoundError:
        return None
    except OSError as error:
        threads.log(f"ignoring {attempt_folder / RESULT_FILE}: {error.strerror}")
        return None


def redact_result(data: bytes, redactor: Redactor) -> bytes:
    """Only text: a pickle, for example, could not be read any more."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return data
    return redactor.data(data)


def upload_result(send: Callable[[], None], timeout: float, paused: Callable[[], bool]) -> bool:
    """Retry until it is accepted, rejected, or timed out. Time for which `paused` is true, because
    the server is unreachable, does not count."""
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
