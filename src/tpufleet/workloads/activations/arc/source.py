"""ARC tasks as samples: each task, several augmentations, one prompt for each of its tests."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from random import Random
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.workloads.activations.arc import grids, prompts, tasks
from tpufleet.workloads.activations.samples import Sample


class ArcSource:
    """Samples in the order task, augmentation, test. Each augmentation has a seed of its own, so
    a sample is the same whoever makes it."""

    def __init__(self, lines: Any, data: Mapping[str, Any], seed: int):
        self._lines, self._seed = lines, seed
        self._encoder_name = data.get("grid_encoder") or grids.DEFAULT
        self._encode = grids.encoder(self._encoder_name)
        self._version = data.get("prompt_version") or prompts.DEFAULT
        if self._version not in prompts.VERSIONS:
            known = ", ".join(prompts.VERSIONS)
            raise BadInput(f"there is no prompt version {self._version!r}; there are {known}")
        self._repeats = int(data.get("predictions_per_task") or 8)
        self._limit = data.get("max_tasks")
        counts = []
        for number, line in enumerate(lines):
            if self._limit is not None and number >= self._limit:
                break
            counts.append(self._repeats * _tests(line))
        ends = list(accumulate(counts, initial=0))
        self._starts, self._count = ends[:-1], ends[-1]

    def count(self) -> int:
        return self._count

    def read(self, span: range) -> list[Sample]:
        if not len(span):
            return []
        first = bisect_right(self._starts, span.start) - 1
        last = bisect_right(self._starts, span.stop - 1) - 1
        found: list[Sample] = []
        for number, line in enumerate(self._lines.read(range(first, last + 1)), first):
            stop = self._starts[number + 1] if number + 1 < len(self._starts) else self._count
            wanted = range(max(span.start, self._starts[number]), min(span.stop, stop))
            found += self._samples(number, line, wanted)
        return found

    def digest(self) -> str:
        settings = (self._encoder_name, self._version, self._repeats, self._limit, self._seed)
        return self._lines.digest(*settings)

    def _samples(self, number: int, line: bytes, wanted: range) -> list[Sample]:
        task = _parse(line)
        wrong = "not JSON" if task is None else tasks.fault(task)
        if wrong:
            return [
                Sample(index=index, id=f"{tasks.task_id(number)}/{index}", fault=wrong)
                for index in wanted
            ]
        tests = len(task["test"])
        made: dict[int, tuple[tasks.Augmentation, list[prompts.Prompt]]] = {}
        return [
            self._sample(number, task, index, divmod(index - self._starts[number], tests), made)
            for index in wanted
        ]

    def _sample(
        self,
        number: int,
        task: Mapping[str, Any],
        index: int,
        place: tuple[int, int],
        made: dict[int, tuple[tasks.Augmentation, list[prompts.Prompt]]],
    ) -> Sample:
        turn, test = place
        if turn not in made:
            change = tasks.augmentation(task, turn, Random(f"{self._seed}/{number}/{turn}"))
            changed = tasks.apply(task, change)
            made[turn] = change, prompts.prompts(changed, self._encode, self._version)
        change, asked = made[turn]
        name = task.get("task_id") or tasks.task_id(number)
        return Sample(
            index=index,
            id=f"{name}/{turn}/{test}",
            messages=asked[test].messages(),
            answer=asked[test].answer,
            about={"task_id": name, "test": test, "augmentation": change.to_json()},
        )


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _tests(line: bytes) -> int:
    """How many tests a task has; an unreadable task still counts as one, so numbers stay put."""
    task = _parse(line)
    if not isinstance(task, dict) or not isinstance(task.get("test"), list):
        return 1
    return max(len(task["test"]), 1)
