"""The `tpu` command as a person runs it, inside this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from click.testing import CliRunner, Result

from tpufleet import __main__ as program


class _Tpu:
    name = "tpu"

    def main(self, args: Sequence[str], prog_name: str, **_: Any) -> None:
        sys.exit(program.run(args))


class Tpu:
    """`tpu("jobs", "--json")`, with the environment of one person."""

    def __init__(self, **environ: str) -> None:
        self.environ = environ

    def __call__(self, *args: str, input: str | None = None) -> Result:
        runner = CliRunner(env=self.environ)
        return runner.invoke(_Tpu(), list(args), input=input)  # type: ignore[arg-type]

    def ok(self, *args: str, input: str | None = None) -> str:
        answer = self(*args, input=input)
        assert answer.exit_code == 0, answer.output
        return answer.stdout

    def json(self, *args: str, input: str | None = None) -> Any:
        return json.loads(self.ok(*args, "--json", input=input))
