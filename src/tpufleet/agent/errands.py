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
from tpufleet.model.errands import Errand, ErrandKind, ErrandResult
from tpufleet.model.hosts import HostId

LARGEST_OUTPUT = 256 * 1024
REMEMBERED = 1000


class ErrandRunner:
    def __init__(
        self,
        host_id: HostId,
        work: Path,
        base: Mapping[str, str],
        clock: Clock,
        answer: Callable[[str, ErrandResult], None],
    ) -> None:
        self._host_id = host_id
        self._work = work
        self._base = dict(base)
        self._clock = clock
        self._answer = answer
        self._taken: dict[str, None] = {}

    def take(self, errands: Sequence[Errand]) -> None:
        """Start those that are new."""
        for errand in errands:
            if errand.id not in self._taken:
                self._taken[errand.id] = None
                threads.start(f"errand {errand.id}", lambda errand=errand: self._run(errand))
        for old in list(self._taken)[:-REMEMBERED]:
            del self._taken[old]

    def _run(self, errand: Errand) -> None:
        result = self._outcome(errand)
        try:
            self._answer(errand.id, result)
        except FleetError as error:
            # It is asked for again with the next beat, and then told again.
            threads.say(f"the outcome of errand {errand.id} was not taken: {error}")
            self._taken.pop(errand.id, None)

    def _outcome(self, errand: Errand) -> ErrandResult:
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
            return self._result(status, file.read(LARGEST_OUTPUT + 1), words=words)

    def _command(self, errand: Errand) -> tuple[list[str], dict[str, str]]:
        """A person's command knows nothing of the control plane; our own check-up must."""
        if errand.kind is ErrandKind.COMMAND:
            kept = {k: v for k, v in self._base.items() if not k.startswith("TPUFLEET_")}
            return list(errand.command), kept
        own = [sys.executable, "-m", "tpufleet.agent.checkup"]
        return own + (["--mend"] if errand.kind is ErrandKind.MEND else []), self._base

    def _result(self, status: int | None, output: bytes, words: str) -> ErrandResult:
        return ErrandResult(
            host_id=self._host_id,
            status=status,
            output=output[:LARGEST_OUTPUT].decode(errors="replace"),
            cut=len(output) > LARGEST_OUTPUT,
            at=self._clock.now(),
            words=words,
        )
