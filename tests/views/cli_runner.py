"""Runs the `tpu` command inside this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from click.testing import CliRunner, Result

from tpufleet import __main__ as program


class _TpuProgram:
    name = "tpu"

    def main(self, args: Sequence[str], prog_name: str, **_: Any) -> None:
        sys.exit(program.run(args))


class Tpu:
    """`tpu("jobs", "--json")`, with the environment of one user."""

    def __init__(self, **environ: str) -> None:
        self.environ = environ

    def __call__(self, *args: str, input: str | None = None) -> Result:
        runner = CliRunner(env=self.environ)
        return runner.invoke(_TpuProgram(), list(args), input=input)  # type: ignore[arg-type]  # not a click.Command

    def ok(self, *args: str, input: str | None = None) -> str:
        result = self(*args, input=input)
        assert result.exit_code == 0, result.output
        return result.stdout

    def json(self, *args: str, input: str | None = None) -> Any:
        return json.loads(self.ok(*args, "--json", input=input))
