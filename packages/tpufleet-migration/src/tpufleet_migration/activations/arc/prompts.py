"""Prompt versions for ARC tasks. A version never changes: datasets are compared across runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpufleet.errors import BadInput
from tpufleet_activations.input_errors import check_choice
from tpufleet_migration.activations.arc import prompt_text
from tpufleet_migration.activations.arc.grid_encoders import Encoder

DEFAULT = "output-from-examples-v0"


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
class PromptVersion:
    """One prompt format."""

    opening: str
    ending: Callable[[Mapping[str, Any]], str]
    system: str = prompt_text.SHORT_SYSTEM
    shown: str = "pairs"  # of each example: "pairs", "input", "output" or "none"
    level: int = 2  # heading level of the examples
    answer: str = "### Output\n\n```grid"
    needs: tuple[str, ...] = ()  # task fields beyond train and test inputs


def build_prompts(task: Mapping[str, Any], encode: Encoder, version: str) -> list[Prompt]:
    """One prompt for each test of the task."""
    check_version(version)
    selected = VERSIONS[version]
    for name in selected.needs:
        holders = task["test"] if name == "output" else [task]
        if not all(name in holder for holder in holders):
            raise BadInput(f"prompt version {version} needs {name} in each task or test")
    examples = "".join(
        _example(number, pair, encode, selected) for number, pair in enumerate(task["train"], 1)
    )
    return [
        Prompt(
            system=selected.system,
            user=selected.opening
            + examples
            + selected.ending(_variables(task, test, encode, selected)),
            answer=selected.answer,
        )
        for test in task["test"]
    ]


def check_version(version: str) -> None:
    check_choice("prompt version", version, VERSIONS)


def _variables(
    task: Mapping[str, Any], test: Mapping[str, Any], encode: Encoder, version: PromptVersion
) -> dict[str, Any]:
    """What the end of the prompt may show."""
    variables: dict[str, Any] = {"input": encode(test["input"]), "code": task.get("code", "")}
    if "output" in version.needs:
        variables["output"] = encode(test["output"])
    if "test_output_choices" in version.needs:
        variables["choices"] = [encode(grid) for grid in task["test_output_choices"]]
    return variables


def _example(number: int, pair: Mapping[str, Any], encode: Encoder, version: PromptVersion) -> str:
    mark = "#" * version.level
    if version.shown == "none":
        return ""
    if version.shown != "pairs":
        return f"\n{mark} Grid example {number}\n\n{encode(pair[version.shown])}\n"
    return (
        f"\n{mark} Example {number}\n\n{mark}# Input\n\n{encode(pair['input'])}\n\n"
        f"{mark}# Output\n\n{encode(pair['output'])}\n"
    )


def _test(level: int) -> Callable[[Mapping[str, Any]], str]:
    mark = "#" * level
    return lambda variables: f"\n{mark} Test case\n\n{mark}# Input\n\n{variables['input']}"


def _empty(variables: Mapping[str, Any]) -> str:
    return ""


def _options(variables: Mapping[str, Any]) -> str:
    choices: Sequence[str] = variables["choices"]
    listing = "".join(
        f"\n### Output option {number}\n\n{choice}\n" for number, choice in enumerate(choices, 1)
    )
    return f"{_test(2)(variables)}\n{listing}"


def _verify(variables: Mapping[str, Any]) -> str:
    output = variables["output"]
    return f"{_test(2)(variables)}\n\n### Output\n\n{output}\n\nIs the test output correct?"


def _code(variables: Mapping[str, Any]) -> str:
    return f"{variables['code']}\n```\n\n## Example\n\n### Input\n\n{variables['input']}"


VERSIONS = {
    "output-from-examples-v0": PromptVersion(
        opening=prompt_text.SOLVE_SHORT, ending=_test(2), system=prompt_text.LONG_SYSTEM
    ),
    "output-from-examples-v1": PromptVersion(opening=prompt_text.SOLVE, ending=_test(2)),
    "input-from-inputs-v0": PromptVersion(
        opening=prompt_text.NEW_GRID,
        ending=_empty,
        shown="input",
        answer="## New grid\n\n```grid",
    ),
    "output-from-outputs-v0": PromptVersion(
        opening=prompt_text.NEW_GRID,
        ending=_empty,
        shown="output",
        answer="## New grid\n\n```grid",
    ),
    "code-from-examples-v0": PromptVersion(
        opening=prompt_text.WRITE_CODE, ending=_empty, answer="```python\n"
    ),
    "code-from-examples-v1": PromptVersion(
        opening=prompt_text.GENERATE_CODE,
        ending=lambda variables: "\n## Code\n\nImplement the transformation in Python.",
        level=3,
        answer="```python\n",
    ),
    "code-from-examples-v2": PromptVersion(
        opening=prompt_text.GENERATE_CODE,
        ending=_empty,
        level=3,
        answer=prompt_text.CODE_ANSWER,
    ),
    "code-from-examples-v3": PromptVersion(
        opening=prompt_text.GENERATE_CODE.replace("task(grid)", "task(img)"),
        ending=_test(3),
        level=3,
        answer=prompt_text.CODE_ANSWER,
    ),
    "output-from-code-v0": PromptVersion(
        opening=prompt_text.APPLY_CODE, ending=_code, shown="none", needs=("code",)
    ),
    "select-output-from-examples-v0": PromptVersion(
        opening=prompt_text.SELECT, ending=_options, answer="", needs=("test_output_choices",)
    ),
    "verify-output-from-examples-v0": PromptVersion(
        opening=prompt_text.VERIFY, ending=_verify, answer="", needs=("output",)
    ),
}
