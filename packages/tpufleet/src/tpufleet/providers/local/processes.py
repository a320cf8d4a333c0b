"""The processes of simulated hosts: start, check, find and kill them.

Every agent has a marker in its environment, which its children inherit; so every process of a host
can be found, even if it left its session or lost its parent. An agent that makes its memory
unreadable also has the marker on its command line (`-X LOCAL_TPU_SLICE=…`).

Where the machine lets us, a host is also a control group: no process leaves it, with or without its
marker, and all are killed at once.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec
import psutil

from tpufleet.linux.cgroups import Cgroup
from tpufleet.linux.launcher_environment import HOST_MARKER_VARIABLE

MARKER_VARIABLE = HOST_MARKER_VARIABLE
# Start times are floats of whole clock ticks (10 ms). A PID is not reused within this time: all
# other PIDs would have to be used first.
START_TIME_TOLERANCE = 0.05
CGROUPS_DIE_WITHIN = 5.0  # seconds
RECHECK_AFTER = 0.5  # seconds for which a process is assumed to be alive still


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies a process for ever: a PID alone is reused after the process ended."""

    pid: int
    started: float


class LeftoverProcess(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    marker: str
    command: str


@cache
def root_marker(root: Path) -> str:
    """Distinguishes the processes of one state folder from those of another."""
    return hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:12]


def host_marker(root: Path, slice_id: str, index: int) -> str:
    return f"{slice_marker(root, slice_id)}{index}"


def slice_marker(root: Path, slice_id: str) -> str:
    return f"{root_marker(root)}/{slice_id}/"


def leftovers(root: Path) -> list[LeftoverProcess]:
    """Every live process of any slice of this root."""
    left = []
    for process, marker in find_marked(lambda marker: marker.startswith(root_marker(root) + "/")):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue  # ended meanwhile
        left.append(LeftoverProcess(pid=process.pid, marker=marker, command=command))
    return left


def find_marked(matches: Callable[[str], bool]) -> list[tuple[psutil.Process, str]]:
    """Live processes of this user whose marker matches, and their descendants."""
    own_pid, user = os.getpid(), os.getuid()
    parents: dict[int, int] = {}
    processes: dict[int, psutil.Process] = {}
    markers: dict[int, str] = {}
    for process in psutil.process_iter():
        try:
            with process.oneshot():
                # Root's jobs may run as another user.
                foreign = user != 0 and process.uids().real != user
                if process.pid == own_pid or foreign or is_dead(process):
                    continue
                parents[process.pid] = process.ppid()
                processes[process.pid] = process
                marker = _marker_of(process)
        except (psutil.Error, OSError):
            continue  # ended meanwhile, or not readable
        if marker and matches(marker):
            markers[process.pid] = marker
    _add_descendants(markers, parents)
    return [(processes[pid], marker) for pid, marker in markers.items()]


def _marker_of(process: psutil.Process) -> str:
    """From its environment, or from its command line if its memory is unreadable."""
    try:
        return process.environ().get(MARKER_VARIABLE, "")
    except psutil.AccessDenied:
        option = f"{MARKER_VARIABLE}="
        arguments = process.cmdline()
        return next((arg.removeprefix(option) for arg in arguments if arg.startswith(option)), "")


def _add_descendants(markers: dict[int, str], parents: Mapping[int, int]) -> None:
    """A child that cleared its environment is found through its parent."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    queue = list(markers)
    while queue:
        parent = queue.pop()
        for pid in children.get(parent, ()):
            if pid not in markers:
                markers[pid] = markers[parent]
                queue.append(pid)


def is_dead(process: psutil.Process) -> bool:
    return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class Processes:
    """Starts and checks processes. Its state is only a cache."""

    def __init__(self) -> None:
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # kept to reap them
        self._alive: dict[ProcessId, tuple[psutil.Process, float]] = {}

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
        cgroup: Cgroup | None = None,
    ) -> ProcessId:
        """Start a detached process, which outlives us and gets no signals from our terminal."""
        if shutil.which(argv[0], path=environment.get("PATH")) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
        with log.open("ab") as output:
            child = subprocess.Popen(
                [*_enter(cgroup), *argv],
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
        except psutil.NoSuchProcess:  # ended already; no process has this start time
            return ProcessId(pid=child.pid, started=0.0)

    def alive(self, identity: ProcessId, marker: str) -> bool:
        """Whether this very process is alive. Setting the system clock changes the start times of
        running processes, so a matching marker is accepted as well."""
        known = self._alive.get(identity)
        now = time.monotonic()
        if known is not None and now - known[1] < RECHECK_AFTER:
            return True
        try:
            process = known[0] if known else psutil.Process(identity.pid)
            same = process.is_running() if known else _same(process, identity, marker)
            is_alive = same and not is_dead(process)
        except psutil.Error:
            is_alive = False
        if is_alive:
            self._alive[identity] = (process, now)
        else:
            self._alive.pop(identity, None)
        return is_alive

    def reap(self) -> None:
        """Reap children that ended."""
        for pid, child in list(self._children.items()):
            if child.poll() is not None:
                self._children.pop(pid, None)

    def kill_cgroups(self, groups: Sequence[Cgroup]) -> list[Cgroup]:
        """Kill and remove them. A machine dies all at once, so they are frozen first. Returns those
        with processes that are still alive after a while."""
        existing = [group for group in groups if group.exists]
        for group in existing:
            group.freeze(True)
        for group in existing:
            group.kill()
        deadline = time.monotonic() + CGROUPS_DIE_WITHIN
        left = [
            group
            for group in existing
            if not group.kill_within(max(0.0, deadline - time.monotonic()))
        ]
        self.reap()
        return left

    def suspend(self, matches: Callable[[str], bool]) -> int:
        """SIGSTOP. Twice, because a process may have forked during the first scan."""
        count = 0
        for _ in range(2):
            count = _signal((process for process, _ in find_marked(matches)), signal.SIGSTOP)
        return count

    def kill(self, matches: Callable[[str], bool], within: float = 1.0) -> set[str]:
        """SIGKILL until none is left. Returns the markers of processes that are still alive
        after `within` seconds."""
        deadline = time.monotonic() + within
        while marked := find_marked(matches):
            if time.monotonic() > deadline:
                return {marker for _, marker in marked}
            # A machine dies all at once: no process on it may see another one die and report it.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                _signal((process for process, _ in marked), number)
            while any(_is_alive(process) for process, _ in marked) and time.monotonic() < deadline:
                time.sleep(0.005)
                self.reap()
        self.reap()
        self._alive.clear()
        return set()


def _enter(cgroup: Cgroup | None) -> list[str]:
    """A prefix that moves the new process into the group before it starts anything."""
    if cgroup is None:
        return []
    return ["/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"', str(cgroup.path / "cgroup.procs")]


def _same(process: psutil.Process, identity: ProcessId, marker: str) -> bool:
    if abs(process.create_time() - identity.started) < START_TIME_TOLERANCE:
        return True
    try:
        return _marker_of(process) == marker
    except OSError:
        return False


def _is_alive(process: psutil.Process) -> bool:
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
            continue  # callers that need to know check again
    return count
