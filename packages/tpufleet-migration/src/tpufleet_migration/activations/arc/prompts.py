"""ARC prompts: of a version in prompts.toml, or of a file with `system`, `user` and `answer`.

`user` is a Jinja template. It may use `train_samples` (each with `input` and `output`),
`test_input`, `test_output`, `code` and `test_output_choices`; grids are rendered by the grid
encoder. A version never changes: datasets are compared across runs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tpufleet.errors import BadInput, unreadable
from tpufleet_migration.activations.arc.grid_encoders import Encoder

DEFAULT = "output-from-examples-v0"
PARTS = ("system", "user", "answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A conversation that ends where the model would continue."""

    system: str
    user: str
    answer: str

    def messages(self) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": self.system},
            {"role": "user", "content": self.user},
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTemplate:
    """What all prompts have in common; `user` is rendered for each."""

    system: str
    user: str
    answer: str

    def prompts(self, task: Mapping[str, Any], encode: Encoder) -> list[Prompt]:
        """One prompt for each test of the task."""
        variables = {name: task[name] for name in ("code",) if name in task}
        variables["train_samples"] = [_encoded(pair, encode) for pair in task["train"]]
        if "test_output_choices" in task:
            variables["test_output_choices"] = [encode(one) for one in task["test_output_choices"]]
        return [
            Prompt(system=self.system, user=self._user(variables, test, encode), answer=self.answer)
            for test in task["test"]
        ]

    def _user(self, variables: Mapping[str, Any], test: Mapping[str, Any], encode: Encoder) -> str:
        grids = {f"test_{name}": text for name, text in _encoded(test, encode).items()}
        try:
            return _compiled(self.user).render(**variables, **grids)
        except jinja2.TemplateError as error:
            raise _invalid(error) from error


def read_template(path: Path) -> dict[str, str]:
    """The parts of a template file."""
    try:
        return validate_template(tomllib.loads(path.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def validate_template(parts: Mapping[str, Any]) -> dict[str, str]:
    """Raise unless all parts are present, are strings, and compile."""
    if set(parts) != set(PARTS) or not all(isinstance(part, str) for part in parts.values()):
        raise BadInput(
            f"a prompt file needs the strings {', '.join(PARTS)}; it has {', '.join(sorted(parts))}"
        )
    try:
        _compiled(parts["user"])
    except jinja2.TemplateSyntaxError as error:
        raise _invalid(f"line {error.lineno}: {error.message}") from error
    return {name: parts[name] for name in PARTS}


def _invalid(reason: object) -> BadInput:
    return BadInput(f"the prompt template `user` cannot be rendered: {reason}")


def _encoded(pair: Mapping[str, Any], encode: Encoder) -> dict[str, str]:
    return {name: encode(pair[name]) for name in ("input", "output") if name in pair}


@lru_cache(8)
def _compiled(text: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
    return environment.from_string(text)


_TEXTS = Path(__file__).with_name("prompts.toml").read_text("utf-8")
VERSIONS = {name: PromptTemplate(**parts) for name, parts in tomllib.loads(_TEXTS).items()}
