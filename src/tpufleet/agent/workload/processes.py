"""Every process of an attempt: those in the sessions it began, and those that carry its mark.

A daemon leaves its group and its parent, but keeps the environment it was started with.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection

import psutil

from tpufleet.agent.workload.environment import RUN_DIR_VARIABLE

# A look at all processes costs milliseconds, so look again less and less often.
FIRST_LOOK_SECONDS = 0.02
SLOWEST_LOOK_SECONDS = 0.25


def find_alive(sessions: Collection[int], marked: Callable[[str], bool]) -> list[psutil.Process]:
    """Processes that still run (zombies do not) in these sessions or groups, or with the mark."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if _belongs(process, sessions, marked) and process.status() not in _GONE:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # ended while we looked, or somebody else's
    return found


_GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def _belongs(
    process: psutil.Process, sessions: Collection[int], marked: Callable[[str], bool]
) -> bool:
    pid = process.pid
    if sessions and (os.getsid(pid) in sessions or os.getpgid(pid) in sessions):
        return True
    return marked(process.environ().get(RUN_DIR_VARIABLE, ""))


def send_signal(number: signal.Signals, processes: Collection[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(number)  # refuses when the number belongs to another one now
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # whoever needs to know whether it still lives looks again


def terminate(sessions: Collection[int], marked: Callable[[str], bool]) -> None:
    """SIGTERM once to each: to whole groups at a stroke, then to those outside them."""
    for session in sessions:
        try:
            os.killpg(session, signal.SIGTERM)
        except (ProcessLookupError, PermissionError):
            continue  # only a zombie is left in it
    strayed = [process for process in find_alive(sessions, marked) if _strayed(process, sessions)]
    send_signal(signal.SIGTERM, strayed)


def _strayed(process: psutil.Process, sessions: Collection[int]) -> bool:
    try:
        return os.getpgid(process.pid) not in sessions
    except ProcessLookupError:
        return False


def wait_until_gone(
    sessions: Collection[int], marked: Callable[[str], bool], within: float
) -> bool:
    """Wait until none is left, `within` seconds at most."""
    deadline = time.monotonic() + within
    pause = FIRST_LOOK_SECONDS
    while find_alive(sessions, marked):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * 2, SLOWEST_LOOK_SECONDS)
    return True


def kill(sessions: Collection[int], marked: Callable[[str], bool], within: float) -> bool:
    """SIGKILL until none is left. Again and again: one may fork while we look."""
    deadline = time.monotonic() + within
    pause = 0.005
    while found := find_alive(sessions, marked):
        if time.monotonic() > deadline:
            return False
        send_signal(signal.SIGKILL, found)
        time.sleep(pause)
        pause = min(pause * 2, SLOWEST_LOOK_SECONDS)
    return True
