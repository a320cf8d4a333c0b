"""The first process of a step (setup or command), in its own session."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import msgspec

from tpufleet.agent import threads
from tpufleet.agent.workload import exit_diagnosis, processes
from tpufleet.agent.workload.containment import AttemptProcesses
from tpufleet.agent.workload.environment_variables import RUN_DIR_VARIABLE
from tpufleet.clocks import Clock
from tpufleet.linux.launcher_environment import launcher_environment
from tpufleet.model.fleet.hosts import Exit


class StepProgram(msgspec.Struct, frozen=True, kw_only=True):
    argv: Sequence[str]
    env: Mapping[str, str]  # of `argv` alone: a program that starts it sees nothing of it
    input: bytes = b""
    as_agent: bool = False  # a program of the host, which needs more rights than the job has


class StepProcess:
    """It stays a zombie until it is reaped, so that its pid, which is also the id of its session
    and process group, is not reused."""

    def __init__(
        self,
        program: StepProgram,
        *,
        folder: Path,
        output: int,
        container: AttemptProcesses,
        clock: Clock,
        on_exit: Callable[[], None],
    ) -> None:
        self._oom_events_file = exit_diagnosis.oom_events_file()
        self._oom_kills_before = exit_diagnosis.oom_kill_count(self._oom_events_file)
        self._started = time.monotonic()
        self._process = _start(program, folder, output, container)
        self.session = self._process.pid
        self.seconds = 0.0
        self.finished = False
        self._exit_code = 0  # negative: the signal
        self._exited_at: datetime | None = None
        self._clock = clock
        self._on_exit = on_exit
        threads.start(f"waiter {self.session}", self._wait)

    def _wait(self) -> None:
        self._exit_code = _wait_without_reaping(self._process)
        self._exited_at = self._clock.now()
        self.seconds = time.monotonic() - self._started
        self.finished = True
        self._on_exit()

    def exit(self, *, during_setup: bool) -> Exit:
        """Available once it has finished."""
        assert self._exited_at is not None
        return Exit(
            at=self._exited_at,
            status=self._exit_code if self._exit_code >= 0 else None,
            signal=-self._exit_code if self._exit_code < 0 else None,
            during_setup=during_setup,
        )

    @property
    def failed(self) -> bool:
        return self.finished and self._exit_code != 0

    @property
    def oom_kills(self) -> int:
        return exit_diagnosis.oom_kill_count(self._oom_events_file) - self._oom_kills_before

    def reap(self) -> None:
        self._process.wait()
        processes.forget_agent_child(self._process.pid)


def finished(steps: Sequence[StepProcess]) -> bool:
    return all(step.finished for step in steps)


def decided(steps: Sequence[StepProcess]) -> bool:
    """One that failed decides for all: the others would wait for it."""
    return finished(steps) or any(step.failed for step in steps)


def deciding(steps: Sequence[StepProcess]) -> StepProcess:
    """The first that failed, or else any: only once they are decided."""
    failed = [step for step in steps if step.failed]
    return min(failed, key=lambda step: step.seconds, default=steps[0])


def _start(
    program: StepProgram,
    folder: Path,
    output: int,
    container: AttemptProcesses,
) -> subprocess.Popen[bytes]:
    """Raises OSError when the command cannot be started, as Popen does."""
    env = dict(program.env)
    if container.wraps:
        # So that the processes of this attempt are recognised from the first one on.
        env = {**launcher_environment(), RUN_DIR_VARIABLE: env[RUN_DIR_VARIABLE]}
    reader, writer = os.pipe()
    try:
        with (
            _memory_file(json.dumps(dict(program.env)).encode()) as variables,
            _memory_file(program.input) as stdin,
            processes.agent_children() as register,
        ):
            process = subprocess.Popen(
                container.wrap(
                    program.argv,
                    folder,
                    errors=writer,
                    environment=variables.fileno(),
                    as_agent=program.as_agent,
                ),
                env=env,
                cwd="/" if container.wraps else folder,  # the sandbox enters it
                stdin=stdin if program.input else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(writer, variables.fileno()) if container.wraps else (),
            )
            register(process.pid)
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    with os.fdopen(reader, "rb") as errors:
        number, _, message = errors.read().decode().partition(" ")  # ends when the command runs
    if number:
        process.wait()
        raise OSError(int(number), message)
    return process


@contextmanager
def _memory_file(content: bytes) -> Iterator[IO[bytes]]:
    """Without a name, since it may hold secrets."""
    linux = hasattr(os, "memfd_create")
    with os.fdopen(os.memfd_create("tpufleet"), "w+b") if linux else TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file


def _wait_without_reaping(process: subprocess.Popen[bytes]) -> int:
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.wait()
    result = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert result is not None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
