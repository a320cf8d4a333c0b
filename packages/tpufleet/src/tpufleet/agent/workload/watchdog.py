"""Kills the workload when the agent dies without having stopped it (SIGKILL, a crash).

A workload without its agent holds no lease, so it must not go on writing checkpoints. The watchdog
is a fork of the agent, so it costs no start-up; it detects the agent's death by end of file.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path

from tpufleet.agent import threads
from tpufleet.agent.workload import processes
from tpufleet.agent.workload.containment import Containment
from tpufleet.errors import unexpected

KILL_TIMEOUT_SECONDS = 30.0


class Watchdog:
    """The agent's end of the pipe. Create it before any thread is started."""

    def __init__(self, containment: Containment) -> None:
        reader, self._writer = os.pipe()
        with processes.agent_children() as register:
            if (child := os.fork()) == 0:
                os.close(self._writer)
                _serve(reader, containment)
            register(child)
        os.close(reader)

    def track(self, session: int) -> None:
        self._write(f"+{session}\n")

    def untrack(self, session: int) -> None:
        self._write(f"-{session}\n")

    def _write(self, line: str) -> None:
        try:
            os.write(self._writer, line.encode())
        except BrokenPipeError:
            threads.log("the watchdog process is gone; a crash of the agent would leave orphans")


def _serve(reader: int, containment: Containment) -> None:
    try:
        os.setsid()  # signals to the agent's process group are not meant for the watchdog
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        sessions = _read_until_agent_exits(reader)
        if not kill_leftovers(containment, sessions):
            threads.log("the watchdog could not kill every process of the workload")
    except BaseException:
        threads.log_exception(unexpected("watching the agent"))
    finally:
        os._exit(0)


def _read_until_agent_exits(reader: int) -> set[int]:
    """The sessions that the agent had not ended itself when it died."""
    sessions: set[int] = set()
    with os.fdopen(reader, "rb") as lines:
        for line in lines:
            session = int(line[1:])
            (sessions.add if line.startswith(b"+") else sessions.discard)(session)
    return sessions


def kill_leftovers(containment: Containment, sessions: Collection[int] = ()) -> bool:
    """Kill every process of any attempt of an agent that died."""
    contained_ended = containment.kill_leftovers()
    scope = processes.ProcessSet(
        sessions=sessions, owns_run_dir=run_dirs_under(containment.work_dir)
    )
    return processes.kill(scope, KILL_TIMEOUT_SECONDS) and contained_ended


def run_dirs_under(work_dir: Path) -> Callable[[str], bool]:
    """Matches the run directory of any attempt of this agent."""
    prefix = f"{work_dir}{os.sep}"
    return lambda run_dir: run_dir.startswith(prefix)
