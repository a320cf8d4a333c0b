"""Parses the subset of the Containerfile language that our Containerfile uses. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from tpufleet.errors import BadInput

INSTRUCTIONS = {"ARG", "FROM", "RUN", "COPY", "ENV", "LABEL", "WORKDIR", "USER", "ENTRYPOINT"}
_VARIABLE = re.compile(r"\$\{?([A-Z_][A-Z0-9_]*)\}?")


@dataclass(frozen=True, slots=True)
class Run:
    command: str


@dataclass(frozen=True, slots=True)
class Copy:
    sources: tuple[str, ...]
    target: str
    stage: str = ""  # empty: from the build context


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildStage:
    name: str
    base: str  # an earlier stage, or an image
    steps: tuple[Run | Copy, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)  # build arguments, visible to RUN
    environment: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    entrypoint: tuple[str, ...] = ()


def parse(text: str, arguments: Mapping[str, str] | None = None) -> list[BuildStage]:
    """The stages, in order. `arguments` override the defaults of ARG."""
    parser = _Parser(dict(arguments or {}))
    for number, line in _instructions(text):
        instruction, _, rest = line.partition(" ")
        try:
            parser.add(instruction, rest.strip())
        except (ValueError, KeyError) as error:
            raise BadInput(f"line {number}: cannot parse {line!r}: {error}") from error
    stages = parser.finish()
    for stage in stages:
        copies = [isinstance(step, Copy) and bool(step.stage) for step in stage.steps]
        if not all(copies) if stage is stages[-1] else any(copies):
            raise BadInput(
                f"stage {stage.name}: the last stage consists of COPY --from=STAGE, no other has it"
            )
    return stages


class _Parser:
    def __init__(self, overrides: dict[str, str]) -> None:
        self._overrides = overrides
        self._globals: dict[str, str] = {}
        self._stages: list[BuildStage] = []
        self._current: dict[str, object] | None = None
        self._steps: list[Run | Copy] = []
        self._arguments: dict[str, str] = {}

    def add(self, instruction: str, rest: str) -> None:
        if instruction not in INSTRUCTIONS:
            raise ValueError(f"supported are {', '.join(sorted(INSTRUCTIONS))}")
        if instruction == "ARG":
            self._argument(rest)
        elif instruction == "FROM":
            self._begin(rest)
        elif self._current is None:
            raise ValueError("instruction before the first FROM")
        elif instruction == "RUN":
            self._steps.append(Run(rest))  # the shell expands variables
        elif instruction == "COPY":
            self._steps.append(_copy(self._expand(rest)))
        elif instruction in ("ENV", "LABEL"):
            pairs = dict(item.split("=", 1) for item in shlex.split(rest))
            self._current["environment" if instruction == "ENV" else "labels"] = pairs
        elif instruction == "ENTRYPOINT":
            self._current["entrypoint"] = tuple(json.loads(rest))
        else:
            self._current[instruction.lower()] = self._expand(rest)

    def finish(self) -> list[BuildStage]:
        if self._current is not None:
            self._stages.append(
                BuildStage(steps=tuple(self._steps), arguments=self._arguments, **self._current)  # type: ignore[arg-type]
            )
        self._current, self._steps, self._arguments = None, [], {}
        return self._stages

    def _argument(self, rest: str) -> None:
        name, equals, default = rest.partition("=")
        if self._current is None:
            self._globals[name] = self._overrides.get(name, default)
        else:
            fallback = default if equals else self._globals[name]
            self._arguments[name] = self._overrides.get(name, fallback)

    def _begin(self, rest: str) -> None:
        self.finish()
        fields = self._expand(rest).split()
        named = len(fields) == 3 and fields[1].upper() == "AS"
        if len(fields) != 1 and not named:
            raise ValueError("expected FROM IMAGE or FROM IMAGE AS NAME")
        self._current = {"base": fields[0], "name": fields[2] if named else "image"}

    def _expand(self, text: str) -> str:
        return _VARIABLE.sub(lambda match: {**self._globals, **self._arguments}[match[1]], text)


def _copy(rest: str) -> Copy:
    fields = rest.split()
    stage = ""
    if fields[0].startswith("--from="):
        stage = fields.pop(0).removeprefix("--from=")
    if len(fields) < 2 or fields[0].startswith("--"):
        raise ValueError("expected COPY [--from=STAGE] SOURCE... TARGET")
    return Copy(tuple(fields[:-1]), fields[-1], stage)


def _instructions(text: str) -> list[tuple[int, str]]:
    """Each with its first line number; continuation lines are joined, comments dropped."""
    instructions: list[tuple[int, str]] = []
    first, joined = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        first = first if joined else number
        joined = f"{joined} {line.removesuffix(chr(92)).strip()}".strip()
        if not line.endswith("\\"):
            instructions.append((first, joined))
            joined = ""
    return instructions
