"""Ends the workload when the agent dies without having done so (SIGKILL, a crash).

A workload without its agent holds no lease: it must not go on writing checkpoints. The guard is
a fork of the agent, so it costs no start-up; it learns of the agent's death by end of file.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tpufleet.agent import threads
from tpufleet.agent.workload import processes

KILL_TIMEOUT_SECONDS = 30.0


class Watchdog:
    """The agent's end of the line. Begin it before any thread is started."""

    def __init__(self, work: Path) -> None:
        reader, self._writer = os.pipe()
        if os.fork() == 0:
            os.close(self._writer)
            _serve(reader, work)
        os.close(reader)

    def track(self, session: int) -> None:
        self._tell(f"+{session}\n")

    def untrack(self, session: int) -> None:
        self._tell(f"-{session}\n")

    def _tell(self, line: str) -> None:
        try:
            os.write(self._writer, line.encode())
        except BrokenPipeError:
            threads.log("the guard is gone; the workload would outlive a crash of the agent")


def _serve(reader: int, work: Path) -> None:
    try:
        os.setsid()  # what is sent to the agent's group is not meant for the guard
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        sessions = _sessions_at_the_end(reader)
        if not processes.kill(sessions, run_dirs_under(work), KILL_TIMEOUT_SECONDS):
            threads.log("the guard could not end every process of the workload")
    except BaseException:
        threads.log_exception("the guard failed")
    finally:
        os._exit(0)


def _sessions_at_the_end(reader: int) -> set[int]:
    """Follow what the agent says until it is gone: the sessions it had not ended itself."""
    sessions: set[int] = set()
    with os.fdopen(reader, "rb") as lines:
        for line in lines:
            session = int(line[1:])
            (sessions.add if line.startswith(b"+") else sessions.discard)(session)
    return sessions


def run_dirs_under(work: Path) -> Callable[[str], bool]:
    """Marks of any attempt of this agent's folder."""
    prefix = f"{work}{os.sep}"
    return lambda mark: mark.startswith(prefix)
