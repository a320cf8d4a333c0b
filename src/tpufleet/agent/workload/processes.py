"""Finds and ends every process of an attempt.

Those are the processes in the sessions that it started, and those whose environment names its run
directory: a daemon leaves its process group and its parent, but keeps its environment.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection

import psutil

from tpufleet.agent.workload.environment import RUN_DIR_VARIABLE

# Scanning all processes takes milliseconds, so the interval doubles up to the maximum.
MIN_SCAN_INTERVAL = 0.02
MIN_KILL_INTERVAL = 0.005
MAX_SCAN_INTERVAL = 0.25
_EXITED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def find_alive(
    sessions: Collection[int], owns_run_dir: Callable[[str], bool]
) -> list[psutil.Process]:
    """Running processes (zombies do not count) in these sessions or groups, or of this run
    directory."""
    alive = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if _belongs(process, sessions, owns_run_dir) and process.status() not in _EXITED:
                alive.append(process)
        except (psutil.Error, OSError):
            continue  # exited meanwhile, or another user's
    return alive


def _belongs(
    process: psutil.Process, sessions: Collection[int], owns_run_dir: Callable[[str], bool]
) -> bool:
    pid = process.pid
    if sessions and (os.getsid(pid) in sessions or os.getpgid(pid) in sessions):
        return True
    return owns_run_dir(process.environ().get(RUN_DIR_VARIABLE, ""))


def send_signal(number: signal.Signals, processes: Collection[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(number)  # psutil refuses when the pid was reused
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # callers that need to know check again


def terminate(sessions: Collection[int], owns_run_dir: Callable[[str], bool]) -> None:
    """Send SIGTERM once to each process: to whole groups first, then to those outside them."""
    for session in sessions:
        try:
            os.killpg(session, signal.SIGTERM)
        except (ProcessLookupError, PermissionError):
            continue  # only a zombie is left in it
    alive = find_alive(sessions, owns_run_dir)
    send_signal(signal.SIGTERM, [process for process in alive if _left_group(process, sessions)])


def _left_group(process: psutil.Process, sessions: Collection[int]) -> bool:
    try:
        return os.getpgid(process.pid) not in sessions
    except ProcessLookupError:
        return False


def wait_until_gone(
    sessions: Collection[int], owns_run_dir: Callable[[str], bool], within: float
) -> bool:
    """Wait until no process is left, `within` seconds at most."""
    deadline = time.monotonic() + within
    interval = MIN_SCAN_INTERVAL
    while find_alive(sessions, owns_run_dir):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(interval, left))
        interval = min(interval * 2, MAX_SCAN_INTERVAL)
    return True


def kill(sessions: Collection[int], owns_run_dir: Callable[[str], bool], within: float) -> bool:
    """Send SIGKILL until no process is left; repeatedly, since one may fork meanwhile."""
    deadline = time.monotonic() + within
    interval = MIN_KILL_INTERVAL
    while alive := find_alive(sessions, owns_run_dir):
        if time.monotonic() > deadline:
            return False
        send_signal(signal.SIGKILL, alive)
        time.sleep(interval)
        interval = min(interval * 2, MAX_SCAN_INTERVAL)
    return True
