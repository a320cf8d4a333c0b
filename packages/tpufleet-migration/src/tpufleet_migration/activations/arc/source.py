"""ARC tasks as samples: for each task several augmentations, for each test of a task one prompt."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from tpufleet.errors import BadInput
from tpufleet_activations.input_errors import check_choice
from tpufleet_activations.inputs.files import IndexedLines, find_files
from tpufleet_activations.inputs.kinds import DataKind
from tpufleet_activations.inputs.samples import Sample
from tpufleet_migration.activations.arc import grid_encoders, prompts, tasks
from tpufleet_migration.activations.options import ARC_OPTIONS

SUFFIXES = (".jsonl", ".json")
AugmentedPrompts = tuple[tasks.Augmentation, list[prompts.Prompt]]


def find_task_files(path: str) -> list[Path]:
    return find_files(path, ("*.jsonl", "*.json"))


def detect(path: str, names: Set[str]) -> Set[str]:
    """The suffixes of task files: the first line of the first is a task."""
    suffixes = {suffix for suffix in SUFFIXES if any(name.endswith(suffix) for name in names)}
    return suffixes if suffixes and _holds_tasks(path) else set()


def _holds_tasks(path: str) -> bool:
    with open(find_task_files(path)[0], "rb") as file:
        task = _parse(next((line for line in file if line.strip()), b""))
    return isinstance(task, dict) and {"train", "test"} <= set(task)


class ArcSource:
    """Samples ordered by task, augmentation, test.

    Each augmentation has its own random seed, so a sample does not depend on which worker reads it.
    """

    def __init__(self, paths: Sequence[Path], data: Mapping[str, Any]):
        lines = IndexedLines(paths)
        self._lines, self._seed = lines, int(data.get("seed") or 42)
        self._encoder_name = data.get("grid_encoder") or grid_encoders.DEFAULT
        self._encode = grid_encoders.parse_encoder(self._encoder_name)
        self._prompt = data.get("prompt_version") or prompts.DEFAULT
        if data.get("prompt"):
            self._prompt = prompts.validate_template(json.loads(data["prompt"]))
            self._template = prompts.PromptTemplate(**self._prompt)
        else:
            check_choice("prompt version", self._prompt, prompts.VERSIONS)
            self._template = prompts.VERSIONS[self._prompt]
        self._repeats = int(data.get("predictions_per_task") or 8)
        self._limit = int(data["max_tasks"]) if data.get("max_tasks") else None
        self._unique_names: dict[int, str] = {}  # new names of tasks with an id seen before
        counts = []
        names: set[str] = set()
        for number, line in enumerate(lines):
            if self._limit is not None and number >= self._limit:
                break
            task = _parse(line)
            counts.append(self._repeats * _test_count(task))
            name = _task_name(task, number)
            if name in names:
                name = self._unique_names[number] = f"{name}_{number:08x}"
            names.add(name)
        ends = list(accumulate(counts, initial=0))
        self._starts, self._count = ends[:-1], ends[-1]

    def count(self) -> int:
        return self._count

    def read(self, span: range) -> list[Sample]:
        if not len(span):
            return []
        first = bisect_right(self._starts, span.start) - 1
        last = bisect_right(self._starts, span.stop - 1) - 1
        samples: list[Sample] = []
        for number, line in enumerate(self._lines.read(range(first, last + 1)), first):
            stop = self._starts[number + 1] if number + 1 < len(self._starts) else self._count
            wanted = range(max(span.start, self._starts[number]), min(span.stop, stop))
            samples += self._samples(number, line, wanted)
        return samples

    def streams(self) -> list[tuple[Path, range]]:
        """Each task file, and the indexes of the samples from it."""
        starts = [*self._starts, self._count]
        ends = [starts[min(end, len(self._starts))] for end in self._lines.ends]
        return [
            (path, range(start, end))
            for path, start, end in zip(self._lines.paths, [0, *ends], ends, strict=False)
        ]

    def digest(self) -> str:
        settings = (self._encoder_name, self._prompt, self._repeats, self._limit, self._seed)
        return self._lines.digest(*settings)

    def _samples(self, number: int, line: bytes, wanted: range) -> list[Sample]:
        task = _parse(line)
        error = "not JSON" if task is None else tasks.task_error(task)
        name = self._unique_names.get(number) or _task_name(task, number)
        if error:
            return _skipped(name, wanted, error)
        task = {**task, "task_id": name}
        tests = len(task["test"])
        cache: dict[int, AugmentedPrompts] = {}
        try:
            return [
                self._sample(
                    number, task, index, divmod(index - self._starts[number], tests), cache
                )
                for index in wanted
            ]
        except BadInput as problem:  # this task lacks what the prompt needs; others may have it
            return _skipped(name, wanted, str(problem))

    def _sample(
        self,
        number: int,
        task: Mapping[str, Any],
        index: int,
        position: tuple[int, int],
        cache: dict[int, AugmentedPrompts],
    ) -> Sample:
        """`position` is (augmentation, test); `cache` holds this task's prompts so far."""
        turn, test = position
        if turn not in cache:
            random = Random(f"{self._seed}/{number}/{turn}")
            augmentation = tasks.make_augmentation(task, turn, random)
            augmented = tasks.apply_augmentation(task, augmentation)
            cache[turn] = augmentation, self._template.prompts(augmented, self._encode)
        augmentation, built = cache[turn]
        name = task["task_id"]
        return Sample(
            index=index,
            id=f"{name}/{turn}/{test}",
            messages=built[test].messages(),
            answer=built[test].answer,
            metadata={"task_id": name, "test": test, "augmentation": augmentation.to_json()},
        )


def _skipped(name: str, wanted: range, reason: str) -> list[Sample]:
    return [Sample(index=index, id=f"{name}/{index}", skip_reason=reason) for index in wanted]


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _task_name(task: Any, number: int) -> str:
    name = task.get("task_id") if isinstance(task, dict) else None
    return str(name) if name else tasks.task_id(number)


def _test_count(task: Any) -> int:
    """An unreadable task counts as one test, so that later samples keep their indexes."""
    if not isinstance(task, dict) or not isinstance(task.get("test"), list):
        return 1
    return max(len(task["test"]), 1)


DATA_KINDS = {
    "arc": DataKind(
        detect=detect,
        find=lambda data: find_task_files(data["path"]),
        open=ArcSource,
        options=frozenset({*ARC_OPTIONS, "prompt"}),
    )
}
