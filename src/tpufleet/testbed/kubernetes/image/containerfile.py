"""Reads a Containerfile: as much of its language as ours uses, and no more. Pure."""

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
    stage: str = ""  # empty: from the folder that is built from


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildStage:
    name: str
    base: str  # an earlier stage, or an image
    steps: tuple[Run | Copy, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)  # seen by its RUNs
    environment: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    entrypoint: tuple[str, ...] = ()


def parse(text: str, arguments: Mapping[str, str] | None = None) -> list[BuildStage]:
    """The stages, in order. `given`: arguments other than their defaults."""
    reading = _Reading(dict(arguments or {}))
    for number, line in _instructions(text):
        word, _, rest = line.partition(" ")
        if word not in INSTRUCTIONS:
            known = ", ".join(sorted(INSTRUCTIONS))
            raise BadInput(f"line {number}: {word} is not known here; use {known}")
        try:
            reading.take(word, rest.strip())
        except (ValueError, KeyError) as error:
            raise BadInput(f"line {number}: {line!r} is not understood: {error}") from error
    stages = reading.finish()
    if not stages:
        raise BadInput("there is no FROM")
    if any(isinstance(step, Run) for step in stages[-1].steps):
        raise BadInput("the last stage has a RUN; run it in an earlier one, and COPY what it makes")
    return stages


class _Reading:
    def __init__(self, given: dict[str, str]) -> None:
        self._given = given
        self._globals: dict[str, str] = {}
        self._stages: list[BuildStage] = []
        self._current: dict[str, object] | None = None
        self._steps: list[Run | Copy] = []
        self._arguments: dict[str, str] = {}

    def take(self, word: str, rest: str) -> None:
        if word == "ARG":
            self._argument(rest)
        elif word == "FROM":
            self._begin(rest)
        elif self._current is None:
            raise ValueError("it comes before the first FROM")
        elif word == "RUN":
            self._steps.append(Run(rest))  # the shell fills variables in
        elif word == "COPY":
            self._steps.append(_copy(self._filled(rest)))
        elif word in ("ENV", "LABEL"):
            pairs = dict(item.split("=", 1) for item in shlex.split(rest))
            self._current["environment" if word == "ENV" else "labels"] = pairs
        elif word == "ENTRYPOINT":
            self._current["entrypoint"] = tuple(json.loads(rest))
        else:
            self._current[word.lower()] = self._filled(rest)

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
            self._globals[name] = self._given.get(name, default)
        else:
            own = default if equals else self._globals[name]
            self._arguments[name] = self._given.get(name, own)

    def _begin(self, rest: str) -> None:
        self.finish()
        words = self._filled(rest).split()
        named = len(words) == 3 and words[1].upper() == "AS"
        if len(words) != 1 and not named:
            raise ValueError("write FROM IMAGE or FROM IMAGE AS NAME")
        self._current = {"parent": words[0], "name": words[2] if named else "image"}

    def _filled(self, text: str) -> str:
        return _VARIABLE.sub(lambda match: {**self._globals, **self._arguments}[match[1]], text)


def _copy(rest: str) -> Copy:
    words = rest.split()
    stage = ""
    if words[0].startswith("--from="):
        stage = words.pop(0).removeprefix("--from=")
    if len(words) < 2 or words[0].startswith("--"):
        raise ValueError("write COPY [--from=STAGE] SOURCE… TARGET")
    return Copy(tuple(words[:-1]), words[-1], stage)


def _instructions(text: str) -> list[tuple[int, str]]:
    """Each with the number of its first line; continued lines are joined, comments left out."""
    found: list[tuple[int, str]] = []
    began, gathered = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        began = began if gathered else number
        gathered = f"{gathered} {line.removesuffix(chr(92)).strip()}".strip()
        if not line.endswith("\\"):
            found.append((began, gathered))
            gathered = ""
    return found
