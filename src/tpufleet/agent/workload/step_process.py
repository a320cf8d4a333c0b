"""One process of an attempt, in its own session, and how it ended."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from tpufleet.agent import threads
from tpufleet.agent.workload import exit_diagnosis
from tpufleet.agent.workload.exit_diagnosis import ProcessExit
from tpufleet.clocks import Clock


class StepProcess:
    """Setup or command. It stays a zombie until it is reaped, so that nobody else can be given
    its number, which is also that of its session and group."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        folder: Path,
        output: int,
        clock: Clock,
        on_exit: Callable[[], None],  # called when it has ended
    ) -> None:
        self._memory_events = exit_diagnosis.oom_events_file()
        self._memory_kills_before = exit_diagnosis.oom_kill_count(self._memory_events)
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.session = self._process.pid
        self.seconds = 0.0
        self.finished = False
        self._code = 0  # negative: the signal
        self._ended_at: datetime | None = None
        self._clock = clock
        self._tell = on_exit
        threads.start(f"waiter {self.session}", self._wait)

    def _wait(self) -> None:
        self._code = _wait_without_reaping(self._process)
        self._ended_at = self._clock.now()
        self.seconds = time.monotonic() - self._began
        self.finished = True
        self._tell()

    def exit(self, *, during_setup: bool) -> ProcessExit:
        """Known once it is over."""
        assert self._ended_at is not None
        kills = exit_diagnosis.oom_kill_count(self._memory_events) - self._memory_kills_before
        return ProcessExit(
            at=self._ended_at,
            status=self._code if self._code >= 0 else None,
            signal=-self._code if self._code < 0 else None,
            during_setup=during_setup,
            oom_kills=kills,
        )

    def reap(self) -> None:
        self._process.wait()


def _wait_without_reaping(process: subprocess.Popen[bytes]) -> int:
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.wait()
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
