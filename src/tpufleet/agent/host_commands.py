"""Runs host commands beside the workload: each once, with a timeout, and reports the result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tpufleet.agent import threads
from tpufleet.agent.workload import processes, profiles
from tpufleet.clocks import Clock
from tpufleet.errors import FleetError
from tpufleet.model.host_commands import (
    FILE_CHUNK_BYTES,
    HostCommand,
    HostCommandKind,
    HostCommandResult,
)
from tpufleet.model.hosts import HostId

MAX_OUTPUT_BYTES = 256 * 1024
REMEMBERED_COMMANDS = 1000


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
        self._started: dict[str, None] = {}

    def start_new(self, commands: Sequence[HostCommand]) -> None:
        """Start the commands that were not started before."""
        for command in commands:
            if command.id not in self._started:
                self._started[command.id] = None
                threads.start(f"host command {command.id}", partial(self._run, command))
        for old in list(self._started)[:-REMEMBERED_COMMANDS]:
            del self._started[old]

    def _run(self, command: HostCommand) -> None:
        try:
            if command.kind is HostCommandKind.PROFILE:
                result = self._profile(command)
            else:
                result = self._execute(command)
            self._send_result(command.id, result)
        except FleetError as error:
            # The next heartbeat reply asks for it again; then it runs and is reported again.
            threads.log(f"cannot report the result of host command {command.id}: {error}")
            self._started.pop(command.id, None)

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
        """A user's command sees nothing of the control plane; our own diagnostics must."""
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
