"""The prompt versions for ARC tasks. Their wording is fixed: activations are compared across it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.workloads.activations.arc import wording
from tpufleet.workloads.activations.arc.grids import Encoder

DEFAULT = "output-from-examples-v0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A conversation that stops where the model would go on."""

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
    """One way to ask. Examples are shown as pairs, or as inputs or outputs alone."""

    opening: str
    ending: Callable[[Mapping[str, Any]], str]
    system: str = wording.SHORT_SYSTEM
    shown: str = "pairs"
    level: int = 2  # of the examples' headings
    answer: str = "### Output\n\n```grid"
    needs: tuple[str, ...] = ()  # task fields beyond train and test inputs


def build_prompts(task: Mapping[str, Any], encode: Encoder, version: str) -> list[Prompt]:
    """One prompt for each of the task's tests."""
    if version not in VERSIONS:
        raise BadInput(f"there is no prompt version {version!r}; there are {', '.join(VERSIONS)}")
    chosen = VERSIONS[version]
    missing = [name for name in chosen.needs if name != "output" and name not in task]
    if missing:
        raise BadInput(f"prompt version {version} needs {', '.join(missing)} in each task")
    examples = "".join(
        _example(number, pair, encode, chosen) for number, pair in enumerate(task["train"], 1)
    )
    return [
        Prompt(
            system=chosen.system,
            user=chosen.opening + examples + chosen.ending(_facts(task, test, encode, chosen)),
            answer=chosen.answer,
        )
        for test in task["test"]
    ]


def _facts(
    task: Mapping[str, Any], test: Mapping[str, Any], encode: Encoder, version: PromptVersion
) -> dict[str, Any]:
    facts = {"input": encode(test["input"]), "code": task.get("code", "")}
    if "output" in version.needs:
        if "output" not in test:
            raise BadInput("this prompt version needs the output of each test")
        facts["output"] = encode(test["output"])
    if "test_output_choices" in version.needs:
        facts["choices"] = [encode(grid) for grid in task["test_output_choices"]]
    return facts


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
    return lambda facts: f"\n{mark} Test case\n\n{mark}# Input\n\n{facts['input']}"


def _nothing(facts: Mapping[str, Any]) -> str:
    return ""


def _options(facts: Mapping[str, Any]) -> str:
    choices: Sequence[str] = facts["choices"]
    shown = "".join(
        f"\n### Output option {number}\n\n{choice}\n" for number, choice in enumerate(choices, 1)
    )
    return f"{_test(2)(facts)}\n{shown}"


def _claim(facts: Mapping[str, Any]) -> str:
    return f"{_test(2)(facts)}\n\n### Output\n\n{facts['output']}\n\nIs the test output correct?"


def _code(facts: Mapping[str, Any]) -> str:
    return f"{facts['code']}\n```\n\n## Example\n\n### Input\n\n{facts['input']}"


VERSIONS = {
    "output-from-examples-v0": PromptVersion(
        opening=wording.SOLVE_SHORT, ending=_test(2), system=wording.LONG_SYSTEM
    ),
    "output-from-examples-v1": PromptVersion(opening=wording.SOLVE, ending=_test(2)),
    "input-from-inputs-v0": PromptVersion(
        opening=wording.NEW_GRID, ending=_nothing, shown="input", answer="## New grid\n\n```grid"
    ),
    "output-from-outputs-v0": PromptVersion(
        opening=wording.NEW_GRID, ending=_nothing, shown="output", answer="## New grid\n\n```grid"
    ),
    "code-from-examples-v0": PromptVersion(
        opening=wording.WRITE_CODE, ending=_nothing, answer="```python\n"
    ),
    "code-from-examples-v1": PromptVersion(
        opening=wording.GENERATE_CODE,
        ending=lambda facts: "\n## Code\n\nImplement the transformation in Python.",
        level=3,
        answer="```python\n",
    ),
    "code-from-examples-v2": PromptVersion(
        opening=wording.GENERATE_CODE,
        ending=_nothing,
        level=3,
        answer=wording.CODE_ANSWER,
    ),
    "code-from-examples-v3": PromptVersion(
        opening=wording.GENERATE_CODE.replace("task(grid)", "task(img)"),
        ending=_test(3),
        level=3,
        answer=wording.CODE_ANSWER,
    ),
    "output-from-code-v0": PromptVersion(
        opening=wording.APPLY_CODE, ending=_code, shown="none", needs=("code",)
    ),
    "select-output-from-examples-v0": PromptVersion(
        opening=wording.SELECT, ending=_options, answer="", needs=("test_output_choices",)
    ),
    "verify-output-from-examples-v0": PromptVersion(
        opening=wording.VERIFY, ending=_claim, answer="", needs=("output",)
    ),
}
