"""Runs errands beside the workload: each once, with a time limit, and tells what came of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tpufleet.agent import threads
from tpufleet.clocks import Clock
from tpufleet.errors import FleetError
from tpufleet.model.host_commands import HostCommand, HostCommandKind, HostCommandResult
from tpufleet.model.hosts import HostId

MAX_OUTPUT_BYTES = 256 * 1024
REMEMBERED = 1000


class HostCommandRunner:
    def __init__(
        self,
        host_id: HostId,
        work_dir: Path,
        base_env: Mapping[str, str],
        clock: Clock,
        send_result: Callable[[str, HostCommandResult], None],
    ) -> None:
        self._host_id = host_id
        self._work = work_dir
        self._base = dict(base_env)
        self._clock = clock
        self._answer = send_result
        self._taken: dict[str, None] = {}

    def start_new(self, errands: Sequence[HostCommand]) -> None:
        """Start those that are new."""
        for errand in errands:
            if errand.id not in self._taken:
                self._taken[errand.id] = None
                threads.start(f"errand {errand.id}", lambda errand=errand: self._run(errand))
        for old in list(self._taken)[:-REMEMBERED]:
            del self._taken[old]

    def _run(self, errand: HostCommand) -> None:
        result = self._outcome(errand)
        try:
            self._answer(errand.id, result)
        except FleetError as error:
            # It is asked for again with the next beat, and then told again.
            threads.log(f"the outcome of errand {errand.id} was not taken: {error}")
            self._taken.pop(errand.id, None)

    def _outcome(self, errand: HostCommand) -> HostCommandResult:
        command, environ = self._command(errand)
        with tempfile.TemporaryFile(dir=self._work) as file:
            try:
                child = subprocess.Popen(
                    command, env=environ, cwd=self._work, stdin=subprocess.DEVNULL, stdout=file,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except (OSError, ValueError) as error:
                return self._result(None, b"", words=f"it could not start: {error}")
            words = ""
            try:
                status: int | None = child.wait(errand.timeout.total_seconds())
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                status, words = None, f"ended after {errand.timeout.total_seconds():g} s"
            file.seek(0)
            return self._result(status, file.read(MAX_OUTPUT_BYTES + 1), words=words)

    def _command(self, errand: HostCommand) -> tuple[list[str], dict[str, str]]:
        """A person's command knows nothing of the control plane; our own check-up must."""
        if errand.kind is HostCommandKind.COMMAND:
            kept = {k: v for k, v in self._base.items() if not k.startswith("TPUFLEET_")}
            return list(errand.command), kept
        own = [sys.executable, "-m", "tpufleet.agent.diagnostics"]
        return own + (["--mend"] if errand.kind is HostCommandKind.REPAIR else []), self._base

    def _result(self, status: int | None, output: bytes, words: str) -> HostCommandResult:
        return HostCommandResult(
            host_id=self._host_id,
            status=status,
            output=output[:MAX_OUTPUT_BYTES].decode(errors="replace"),
            truncated=len(output) > MAX_OUTPUT_BYTES,
            at=self._clock.now(),
            message=words,
        )
