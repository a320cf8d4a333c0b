"""Runs host commands beside the workload: each once, with a timeout, a few at a time, and reports
the results."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Lock

from tpufleet.agent import threads
from tpufleet.agent.workload import processes, profiles
from tpufleet.clocks import Clock
from tpufleet.errors import FleetError
from tpufleet.model.fleet.host_commands import (
    FILE_CHUNK_BYTES,
    HostCommand,
    HostCommandKind,
    HostCommandResult,
)
from tpufleet.model.fleet.hosts import HostId

MAX_OUTPUT_BYTES = 256 * 1024
REMEMBERED_COMMANDS = 1000
# They run outside the limits of the job. More than one, so that a diagnosis need not wait for a
# command that takes an hour.
MAX_CONCURRENT = 4


class HostCommandRunner:
    def __init__(
        self,
        host_id: HostId,
        work_dir: Path,
        base_env: Mapping[str, str],
        clock: Clock,
        send_result: Callable[[str, HostCommandResult], None],
        send_file: Callable[[str, HostId, int, bytes], None],
        running_attempt: Callable[[], Path | None],
    ) -> None:
        """`running_attempt`: the folder of the attempt whose command runs now."""
        self._host_id = host_id
        self._work_dir = work_dir
        self._base_env = dict(base_env)
        self._clock = clock
        self._send_result = send_result
        self._send_file = send_file
        self._running_attempt = running_attempt
        self._lock = Lock()  # for what follows
        self._waiting: dict[str, tuple[HostCommand, timedelta]] = {}  # and the uptime on receipt
        self._running: set[str] = set()
        self._finished: dict[str, None] = {}
        self._workers = 0

    def start_new(self, commands: Sequence[HostCommand]) -> None:
        """Start or queue the commands that were not started before. Returns at once.

        `commands` are all that the server wants to be run now. One that waits and is not
        among them was withdrawn: the slice may have been given to another user.
        """
        now = self._clock.uptime()
        with self._lock:
            self._waiting = {
                command.id: (command, self._waiting.get(command.id, (command, now))[1])
                for command in commands
                if command.id not in self._running and command.id not in self._finished
            }
            expired = {
                command: now - since
                for command, since in self._waiting.values()
                if now - since > command.timeout
            }
            if expired:
                threads.start("expired host commands", partial(self._report_expired, expired))
            for command in expired:
                self._running.add(command.id)
                del self._waiting[command.id]
            for _ in range(min(MAX_CONCURRENT - self._workers, len(self._waiting))):
                threads.start("host commands", self._run_waiting)
                self._workers += 1

    def _run_waiting(self) -> None:
        while (next_one := self._take_waiting()) is not None:
            command, waited = next_one
            if waited > command.timeout:
                self._run(command, partial(self._expired, waited))
            elif command.kind is HostCommandKind.PROFILE:
                self._run(command, partial(self._profile, command))
            else:
                self._run(command, partial(self._execute, command))

    def _take_waiting(self) -> tuple[HostCommand, timedelta] | None:
        with self._lock:
            if not self._waiting:
                self._workers -= 1
                return None
            command, since = self._waiting.pop(next(iter(self._waiting)))
            self._running.add(command.id)
            return command, self._clock.uptime() - since

    def _report_expired(self, expired: Mapping[HostCommand, timedelta]) -> None:
        for command, waited in expired.items():
            self._run(command, partial(self._expired, waited))

    def _run(self, command: HostCommand, get_result: Callable[[], HostCommandResult]) -> None:
        finished = True
        try:
            self._send_result(command.id, get_result())
        except FleetError as error:
            # The next heartbeat reply asks for it again; then it runs and is reported again.
            threads.log(f"cannot report the result of host command {command.id}: {error}")
            finished = False
        except Exception:
            threads.log_exception(f"unexpected error in host command {command.id}; continuing")
        with self._lock:
            self._running.discard(command.id)
            if finished:
                self._finished[command.id] = None
            for old in list(self._finished)[:-REMEMBERED_COMMANDS]:
                del self._finished[old]

    def _expired(self, waited: timedelta) -> HostCommandResult:
        seconds = waited.total_seconds()
        message = f"not run: waited {seconds:.0f} s for {MAX_CONCURRENT} other host commands"
        return self._result(None, b"", message=message)

    def _profile(self, command: HostCommand) -> HostCommandResult:
        try:
            archive = profiles.capture(self._running_attempt(), command.id, command.duration)
        except profiles.ProfileFailed as error:
            return self._result(None, b"", message=str(error))
        for offset in range(0, len(archive), FILE_CHUNK_BYTES):
            part = archive[offset : offset + FILE_CHUNK_BYTES]
            self._send_file(command.id, self._host_id, offset, part)
        return self._result(0, f"{len(archive)} bytes\n".encode(), message="")

    def _execute(self, command: HostCommand) -> HostCommandResult:
        argv, env = self._argv_and_env(command)
        with tempfile.TemporaryFile(dir=self._work_dir) as output:
            try:
                with processes.agent_children() as register:
                    child = subprocess.Popen(
                        argv,
                        env=env,
                        cwd=self._work_dir,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                    register(child.pid)
            except (OSError, ValueError) as error:
                return self._result(None, b"", message=f"cannot start: {error}")
            message = ""
            try:
                status: int | None = child.wait(command.timeout.total_seconds())
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                seconds = command.timeout.total_seconds()
                status, message = None, f"timed out after {seconds:g} s"
            processes.forget_agent_child(child.pid)
            output.seek(0)
            return self._result(status, output.read(MAX_OUTPUT_BYTES + 1), message=message)

    def _argv_and_env(self, command: HostCommand) -> tuple[list[str], dict[str, str]]:
        """A user's command sees nothing of the server; our own diagnostics must."""
        if command.kind is HostCommandKind.COMMAND:
            env = {k: v for k, v in self._base_env.items() if not k.startswith("TPUFLEET_")}
            return list(command.command), env
        argv = [sys.executable, "-m", "tpufleet.agent.diagnostics"]
        if command.kind is HostCommandKind.REPAIR:
            argv.append("--repair")
        return argv, self._base_env

    def _result(self, status: int | None, output: bytes, message: str) -> HostCommandResult:
        return HostCommandResult(
            host_id=self._host_id,
            status=status,
            output=output[:MAX_OUTPUT_BYTES].decode(errors="replace"),
            truncated=len(output) > MAX_OUTPUT_BYTES,
            at=self._clock.now(),
            message=message,
        )
