"""Reading how a workload ended: its status, the kernel's memory killer, its last lines."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tpufleet.model import failure_signatures
from tpufleet.model.end_reasons import EndReason
from tpufleet.model.hosts import Exit

TAIL_LINES = 200
_SHELL_SAYS_KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessExit:
    """How the first process of a step ended."""

    at: datetime
    status: int | None = None
    signal: int | None = None
    during_setup: bool = False
    oom_kills: int = 0  # by the kernel, while the step ran

    @property
    def failed(self) -> bool:
        return self.status != 0

    @property
    def description(self) -> str:
        if self.signal is None:
            return f"exited with status {self.status}"
        return f"ended by signal {self.signal} ({_signal_name(self.signal)})"


def exit_of_finished(ended: ProcessExit, tail: list[str]) -> Exit:
    """The workload ended without being told to. Only failures are searched for a cause."""
    evidence = failure_signatures.find_evidence(tail) if ended.failed else None
    reason = evidence.reason if evidence else None
    killed_for_memory = _killed_for_memory(ended, reason)
    if killed_for_memory and reason is None:
        reason = EndReason.OUT_OF_HOST_MEMORY
    return Exit(
        at=ended.at,
        status=ended.status,
        signal=ended.signal,
        during_setup=ended.during_setup,
        oom_killed=killed_for_memory,
        evidence=reason,
        log_line=(evidence.line if evidence else last_line(tail)) if ended.failed else "",
    )


def exit_of_stopped(ended: ProcessExit, why: str, fault: EndReason | None = None) -> Exit:
    """We ended the workload; for its own fault, if there is one."""
    return Exit(
        at=ended.at,
        status=ended.status,
        signal=ended.signal,
        during_setup=ended.during_setup,
        stopped_by_agent=fault is None,
        evidence=fault,
        log_line=why,
    )


def _killed_for_memory(ended: ProcessExit, reason: EndReason | None) -> bool:
    """SIGKILL alone proves nothing; the kernel's count or the program's own words must agree."""
    if ended.signal != signal.SIGKILL and ended.status != _SHELL_SAYS_KILLED:
        return False
    return ended.oom_kills > 0 or reason is EndReason.OUT_OF_HOST_MEMORY


def last_line(tail: list[str]) -> str:
    """The last that the program itself said."""
    for line in reversed(tail):
        if line.strip() and not line.startswith("[tpufleet] "):
            return line.strip()[:500]
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def oom_kill_count(events: Path | None) -> int:
    """How often the kernel has killed for memory in this control group; 0 where it cannot say."""
    if events is None:
        return 0
    try:
        for line in events.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):
        return 0
    return 0


def oom_events_file(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Path | None:
    """The file in which control groups, of version 2 or 1, count this agent's memory kills."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, group = line.split(":", 2)
        tree, name = root, "memory.events"
        if "memory" in controllers.split(","):
            tree, name = root / "memory", "memory.oom_control"
        elif controllers:
            continue
        # A container may see its own group at the top, under whatever name it has outside.
        for folder in (tree / group.lstrip("/"), tree):
            if (folder / name).is_file():
                return folder / name
    return None
