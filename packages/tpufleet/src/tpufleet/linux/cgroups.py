"""Control groups (version 2): every descendant of a process stays in its group, and one write kills
the whole group, however fast it forks.

A hybrid host (version 1 with the version 2 tree at /sys/fs/cgroup/unified) has no controllers in
this tree, so no limits, but `cgroup.kill` works there too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Cgroup:
    path: Path

    def create(self) -> Cgroup:
        self.path.mkdir(parents=True, exist_ok=True)
        return self

    @property
    def exists(self) -> bool:
        return self.path.is_dir()

    def enter(self) -> None:
        """Move the calling process."""
        (self.path / "cgroup.procs").write_text("0")

    def pids(self) -> set[int]:
        """The processes in it and in the groups below it."""
        found: set[int] = set()
        for folder, _, _ in os.walk(self.path):
            try:
                found.update(map(int, Path(folder, "cgroup.procs").read_text().split()))
            except OSError:
                continue  # removed meanwhile
        return found

    @property
    def populated(self) -> bool:
        """Whether any process is in it. Unlike a list of processes, this misses none that fork."""
        try:
            return "populated 1" in (self.path / "cgroup.events").read_text()
        except OSError:
            return False  # removed meanwhile

    def freeze(self, frozen: bool) -> None:
        self._write("cgroup.freeze", "1" if frozen else "0")

    def kill(self) -> None:
        """SIGKILL to every process in it and below it, including those being forked now."""
        self._write("cgroup.kill", "1")

    def kill_within(self, seconds: float) -> bool:
        """Kill until it is empty, then remove it. False when processes are left."""
        deadline = time.monotonic() + seconds
        self.kill()
        while self.populated:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
            self.kill()
        self.remove()
        return True

    def remove(self) -> None:
        """Remove an empty group with the groups below it. One that is still in use stays."""
        for folder, _, _ in os.walk(self.path, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                continue  # not empty yet, or removed by another process

    def enable(self, controllers: Iterable[str]) -> None:
        """Let the groups below it have limits, for the controllers that this host offers."""
        for controller in controllers:
            if controller in self.controllers():
                self._write("cgroup.subtree_control", f"+{controller}")

    def controllers(self) -> list[str]:
        try:
            return (self.path / "cgroup.controllers").read_text().split()
        except OSError:
            return []

    def limit(self, limits: Mapping[str, int]) -> dict[str, int]:
        """Set limits such as `pids.max`. Returns those in force; others have no controller here."""
        in_force = {}
        for name, value in limits.items():
            if (self.path / name).exists():
                self._write(name, str(value))
                in_force[name] = value
        return in_force

    def _write(self, name: str, value: str) -> None:
        try:
            (self.path / name).write_text(value)
        except FileNotFoundError:
            return  # the group is gone


def own_cgroup() -> Cgroup | None:
    """The group of this process in the version 2 tree; None when the host has no such tree."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    inside = next((line[3:] for line in groups if line.startswith("0::/")), None)
    if inside is None:
        return None
    for line in mounts:
        fields, _, filesystem = line.partition(" - ")
        if not filesystem.startswith("cgroup2 "):
            continue
        root, mount_point = fields.split()[3:5]
        relative = os.path.relpath(inside, root)
        if not relative.startswith(".."):
            return Cgroup(Path(mount_point, relative))
    return None


def writable_cgroup() -> Cgroup | None:
    """The group of this process, where it can create groups and kill them; else None."""
    own = own_cgroup()
    if own is None:
        return None
    probe = Cgroup(own.path / f"tpufleet-probe-{os.getpid()}-{time.monotonic_ns()}")
    try:
        probe.path.mkdir()
    except OSError:
        return None
    try:
        enterable = os.access(own.path / "cgroup.procs", os.W_OK)
        return own if enterable and (probe.path / "cgroup.kill").exists() else None
    finally:
        probe.remove()
