"""Runs the `tpu` command inside this process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from click.testing import CliRunner, Result

from tpufleet import __main__ as program


class _TpuProgram:
    name = "tpu"

    def main(self, args: Sequence[str], prog_name: str, **_: Any) -> None:
        sys.exit(program.run(args))


@contextlib.contextmanager
def own_process_settings() -> Iterator[None]:
    """`tpu serve` changes some of its process, which is that of the tests here."""
    mask = os.umask(0o022)
    os.umask(mask)
    on_termination = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        os.umask(mask)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_termination)


class Tpu:
    """`tpu("jobs", "--json")`, with the environment of one user."""

    def __init__(self, **environ: str) -> None:
        self.environ = environ

    def __call__(self, *args: str, input: str | None = None) -> Result:
        runner = CliRunner(env=self.environ)
        with own_process_settings():
            return runner.invoke(_TpuProgram(), list(args), input=input)  # type: ignore[arg-type]  # not a click.Command

    def ok(self, *args: str, input: str | None = None) -> str:
        result = self(*args, input=input)
        assert result.exit_code == 0, result.output
        return result.stdout

    def json(self, *args: str, input: str | None = None) -> Any:
        return json.loads(self.ok(*args, "--json", input=input))
