"""Finds and ends every process of an attempt.

Those are the processes in its container (see `containment`), those in the sessions that it started,
and those whose environment names its run directory: a daemon leaves its process group and its
parent, but keeps its environment.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec
import psutil

from tpufleet.agent.workload.environment_variables import RUN_DIR_VARIABLE

# Scanning all processes takes milliseconds, so the interval doubles up to the maximum.
MIN_SCAN_INTERVAL = 0.02
MIN_KILL_INTERVAL = 0.005
MAX_SCAN_INTERVAL = 0.25
_EXITED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class Container(Protocol):
    """Holds the processes of an attempt whatever they do."""

    def pids(self) -> set[int]: ...

    def kill(self) -> None: ...


class ProcessSet(msgspec.Struct, frozen=True, kw_only=True):
    """How the processes of one or more attempts are recognised."""

    sessions: Collection[int] = ()
    owns_run_dir: Callable[[str], bool]
    container: Container | None = None

    def contained_pids(self) -> set[int]:
        return self.container.pids() if self.container else set()


# Children of the agent that belong to no attempt, such as the watchdog and host commands.
_agent_children: set[int] = set()
_spawn_lock = threading.Lock()


@contextmanager
def agent_children() -> Iterator[Callable[[int], None]]:
    """While it is open, no new child is taken for an orphan; call the result with its pid."""
    with _spawn_lock:
        yield _agent_children.add


def forget_agent_child(pid: int) -> None:
    _agent_children.discard(pid)


def adopted_orphans() -> set[int]:
    """Processes that became children of the agent when their parent died, with their descendants.
    Those that have exited are reaped."""
    own = psutil.Process()
    found: set[int] = set()
    with _spawn_lock:
        children = [child for child in own.children() if child.pid not in _agent_children]
    for child in children:
        try:
            if child.status() == psutil.STATUS_ZOMBIE:
                _reap(child.pid)
                continue
            found.add(child.pid)
            found.update(process.pid for process in child.children(recursive=True))
        except psutil.Error:
            continue  # ended meanwhile
    return found


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # reaped by its owner


def find_alive(scope: ProcessSet) -> list[psutil.Process]:
    """Running processes; zombies do not count."""
    alive, contained = [], scope.contained_pids()
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            belongs = process.pid in contained or _belongs(process, scope)
            if belongs and process.status() not in _EXITED:
                alive.append(process)
        except (psutil.Error, OSError):
            continue  # exited meanwhile, or another user's
    return alive


def _belongs(process: psutil.Process, scope: ProcessSet) -> bool:
    pid, sessions = process.pid, scope.sessions
    if sessions and (os.getsid(pid) in sessions or os.getpgid(pid) in sessions):
        return True
    return scope.owns_run_dir(process.environ().get(RUN_DIR_VARIABLE, ""))


def send_signal(number: signal.Signals, processes: Collection[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(number)  # psutil refuses when the pid was reused
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # callers that need to know check again


def terminate(scope: ProcessSet) -> None:
    """Send SIGTERM once to each process: to whole groups first, then to those outside them."""
    _signal_groups(signal.SIGTERM, scope.sessions)
    alive = find_alive(scope)
    outside = [process for process in alive if _group(process) not in (None, *scope.sessions)]
    send_signal(signal.SIGTERM, outside)


def wait_until_gone(scope: ProcessSet, within: float) -> bool:
    """Wait until no process is left, `within` seconds at most."""
    deadline = time.monotonic() + within
    interval = MIN_SCAN_INTERVAL
    while find_alive(scope):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(interval, left))
        interval = min(interval * 2, MAX_SCAN_INTERVAL)
    return True


def kill(scope: ProcessSet, within: float) -> bool:
    """Send SIGKILL until no process is left; repeatedly, since one may fork meanwhile. A container
    and a process group are killed as a whole, including processes that are being forked."""
    deadline = time.monotonic() + within
    interval = MIN_KILL_INTERVAL
    if scope.container:
        scope.container.kill()
    while alive := find_alive(scope):
        if time.monotonic() > deadline:
            return False
        if scope.container:
            scope.container.kill()
        groups = {group for process in alive if (group := _group(process))}
        _signal_groups(signal.SIGKILL, groups - {os.getpgrp()})
        send_signal(signal.SIGKILL, alive)
        time.sleep(interval)
        interval = min(interval * 2, MAX_SCAN_INTERVAL)
    return True


def _group(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except (ProcessLookupError, PermissionError):
        return None


def _signal_groups(number: signal.Signals, groups: Collection[int]) -> None:
    for group in groups:
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            continue  # only a zombie is left in it
