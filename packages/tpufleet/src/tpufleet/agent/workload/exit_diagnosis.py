"""Diagnoses how a workload exited: exit status, the kernel's OOM killer, the last log lines."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

from tpufleet.model.fleet.hosts import Exit
from tpufleet.model.job import failure_signatures
from tpufleet.model.job.end_reasons import EndReason

TAIL_LINES = 200
AGENT_LINE_PREFIX = "[tpufleet] "  # of lines in the log that the agent wrote itself
_SHELL_STATUS_KILLED = 128 + signal.SIGKILL


def describe(exit: Exit) -> str:
    if exit.signal is None:
        return f"exited with status {exit.status}"
    return f"killed by signal {exit.signal} ({_signal_name(exit.signal)})"


def exit_of_finished(exit: Exit, oom_kills: int, tail: list[str]) -> Exit:
    """For a workload that exited by itself. Only failures are searched for a cause. `oom_kills`: by
    the kernel, while the step ran."""
    if exit.status == 0:
        return exit
    evidence = failure_signatures.find_evidence(tail)
    reason = evidence.reason if evidence else None
    # SIGKILL alone proves nothing: the kernel's counter or the program's output must agree.
    killed = exit.signal == signal.SIGKILL or exit.status == _SHELL_STATUS_KILLED
    oom_killed = killed and (oom_kills > 0 or reason is EndReason.OUT_OF_HOST_MEMORY)
    if oom_killed and reason is None:
        reason = EndReason.OUT_OF_HOST_MEMORY
    explanation = evidence.line if evidence else failure_signatures.uncaught_exception(tail)
    return replace(
        exit,
        oom_killed=oom_killed,
        evidence=reason,
        log_line=explanation or last_line(tail),
        unexplained=not explanation,
    )


def exit_of_stopped(exit: Exit, reason: str, fault: EndReason | None = None) -> Exit:
    """For a workload that the agent stopped; `fault` is set when the workload is the cause."""
    return replace(exit, stopped_by_agent=fault is None, evidence=fault, log_line=reason)


def last_line(tail: list[str]) -> str:
    """The last line that the program itself wrote."""
    for line in reversed(tail):
        own = line.strip() and not line.startswith(AGENT_LINE_PREFIX)
        if own and not failure_signatures.is_benign(line):
            return line.strip()[:500]
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def oom_kill_count(events_file: Path | None) -> int:
    """OOM kills that the kernel has counted in this control group; 0 where it does not count."""
    if events_file is None:
        return 0
    try:
        for line in events_file.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):
        return 0
    return 0


def oom_events_file(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Path | None:
    """The file of this agent's control group (version 2 or 1) that counts OOM kills."""
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
        # A container may see its own group at the root, whatever its name is outside.
        for folder in (tree / group.lstrip("/"), tree):
            if (folder / name).is_file():
                return folder / name
    return None
