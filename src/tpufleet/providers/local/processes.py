"""The processes of simulated hosts: start them, tell whether they live, find and end them.

Every agent carries a marker in its environment, which all that it starts inherits; so whatever
a host ever started can be found, also when it left its session or lost its parent. One that closes
its memory to others carries it on its command line as well (`-X LOCAL_TPU_SLICE=…`).
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

MARKER_VARIABLE = "LOCAL_TPU_SLICE"
# Start times are stored as floats of whole clock ticks (10 ms); two processes under one number
# within this span would need the whole number space in between.
START_TIME_TOLERANCE = 0.05
RECHECK_AFTER = 0.5  # seconds for which "it lives" is believed without a second look


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessId:
    """A process, not just a number: numbers are given to others once a process has ended."""

    pid: int
    started: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftoverProcess:
    pid: int
    marker: str
    command: str


@cache
def root_marker(root: Path) -> str:
    """Tells the processes of one state folder from those of another."""
    return hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:12]


def host_marker(root: Path, slice_id: str, index: int) -> str:
    return f"{slice_marker(root, slice_id)}{index}"


def slice_marker(root: Path, slice_id: str) -> str:
    return f"{root_marker(root)}/{slice_id}/"


def leftovers(root: Path) -> list[LeftoverProcess]:
    """Every live process of any slice of this root. Empty is the proof that nothing is left."""
    found = []
    for process, marker in find_marked(lambda mark: mark.startswith(root_marker(root) + "/")):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue  # ended while we looked
        found.append(LeftoverProcess(pid=process.pid, marker=marker, command=command))
    return found


def find_marked(wanted: Callable[[str], bool]) -> list[tuple[psutil.Process, str]]:
    """Live processes of this user whose marker is wanted, and all that they started."""
    mine, user = os.getpid(), os.getuid()
    parents: dict[int, int] = {}
    processes: dict[int, psutil.Process] = {}
    found: dict[int, str] = {}
    for process in psutil.process_iter():
        try:
            with process.oneshot():
                if process.pid == mine or process.uids().real != user or is_dead(process):
                    continue
                parents[process.pid] = process.ppid()
                processes[process.pid] = process
                mark = _marker_of(process)
        except (psutil.Error, OSError):
            continue  # ended while we looked, or not ours to look at
        if mark and wanted(mark):
            found[process.pid] = mark
    _add_descendants(found, parents)
    return [(processes[pid], mark) for pid, mark in found.items()]


def _marker_of(process: psutil.Process) -> str:
    """From its environment; from its command line where it has closed its memory to us."""
    try:
        return process.environ().get(MARKER_VARIABLE, "")
    except psutil.AccessDenied:
        option = f"{MARKER_VARIABLE}="
        words = process.cmdline()
        return next((word.removeprefix(option) for word in words if word.startswith(option)), "")


def _add_descendants(found: dict[int, str], parents: Mapping[int, int]) -> None:
    """A child that cleaned its environment still has a parent that shows where it belongs."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    queue = list(found)
    while queue:
        parent = queue.pop()
        for pid in children.get(parent, ()):
            if pid not in found:
                found[pid] = found[parent]
                queue.append(pid)


def is_dead(process: psutil.Process) -> bool:
    return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class Processes:
    """Starts and watches processes. Holds nothing that could not be found out again."""

    def __init__(self) -> None:
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # only so that none stays a zombie
        self._lives: dict[ProcessId, tuple[psutil.Process, float]] = {}

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path
    ) -> ProcessId:
        """A detached process: it outlives us, and signals to our terminal do not reach it."""
        with log.open("ab") as output:
            child = subprocess.Popen(
                list(argv),
                env=dict(environment),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[child.pid] = child
        try:
            return ProcessId(pid=child.pid, started=psutil.Process(child.pid).create_time())
        except psutil.NoSuchProcess:  # ended at once; no process has this start time
            return ProcessId(pid=child.pid, started=0.0)

    def alive(self, identity: ProcessId, marker: str) -> bool:
        """Whether this very process lives. A machine whose clock was set shows other start times
        for the same process, so the marker may vouch for it instead."""
        known = self._lives.get(identity)
        now = time.monotonic()
        if known is not None and now - known[1] < RECHECK_AFTER:
            return True
        try:
            process = known[0] if known else psutil.Process(identity.pid)
            same = process.is_running() if known else _same(process, identity, marker)
            lives = same and not is_dead(process)
        except psutil.Error:
            lives = False
        if lives:
            self._lives[identity] = (process, now)
        else:
            self._lives.pop(identity, None)
        return lives

    def reap(self) -> None:
        """Take note of children that ended."""
        for pid, child in list(self._children.items()):
            if child.poll() is not None:
                self._children.pop(pid, None)

    def suspend(self, wanted: Callable[[str], bool]) -> int:
        """SIGSTOP. Twice over, because one that was about to start a child may have done so."""
        count = 0
        for _ in range(2):
            count = _signal((process for process, _ in find_marked(wanted)), signal.SIGSTOP)
        return count

    def kill(self, wanted: Callable[[str], bool], within: float = 1.0) -> set[str]:
        """SIGKILL until none is found. The markers of those that still live after `within`
        seconds: empty when all is done."""
        deadline = time.monotonic() + within
        while found := find_marked(wanted):
            if time.monotonic() > deadline:
                return {mark for _, mark in found}
            # A machine dies at a stroke: nobody on it sees another one die, and tells of it.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                _signal((process for process, _ in found), number)
            while any(_lives(process) for process, _ in found) and time.monotonic() < deadline:
                time.sleep(0.005)
                self.reap()
        self.reap()
        self._lives.clear()
        return set()


def _same(process: psutil.Process, identity: ProcessId, mark: str) -> bool:
    if abs(process.create_time() - identity.started) < START_TIME_TOLERANCE:
        return True
    try:
        return _marker_of(process) == mark
    except OSError:
        return False


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and not is_dead(process)
    except psutil.Error:
        return False


def _signal(processes: Iterable[psutil.Process], number: int) -> int:
    count = 0
    for process in processes:
        try:
            process.send_signal(number)
            count += 1
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # whoever needs to know whether it still lives looks again
    return count
