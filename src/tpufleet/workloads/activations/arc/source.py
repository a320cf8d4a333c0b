"""ARC tasks as samples: each task, several augmentations, one prompt for each of its tests."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.workloads.activations.arc import former, grids, prompts, tasks, templates
from tpufleet.workloads.activations.io import remote_files
from tpufleet.workloads.activations.samples import Sample

Made = tuple[tasks.Augmentation, list[prompts.Prompt]]


def find_task_files(data: Mapping[str, Any]) -> list[Path]:
    """Where the tasks lie: files of lines, or what a former manifest or sharded folder names."""
    from tpufleet.workloads.activations.inputs import find_files

    path = data["path"]
    if former.MASTER_METADATA in remote_files.list_names(path):
        return former.sharded_files(remote_files.fetch(path, recursive=True))
    found = find_files(path, ("*.jsonl", "*.json"))
    if len(found) == 1 and former.is_manifest(found[0]):
        return former.stream_files(
            found[0],
            streams=data.get("streams"),
            skip_completed=bool(data.get("skip_completed")),
        )
    return found


class ArcSource:
    """Samples in the order task, augmentation, test. Each augmentation has a seed of its own, so
    a sample is the same whoever makes it."""

    def __init__(self, lines: Any, data: Mapping[str, Any], seed: int):
        self._lines, self._seed = lines, seed
        self._encoder_name = data.get("grid_encoder") or grids.DEFAULT
        self._encode = grids.parse_encoder(self._encoder_name)
        self._version = data.get("prompt_version") or prompts.DEFAULT
        self._template = None
        if data.get("prompt"):
            self._template = templates.PromptTemplate(**templates.validate_template(data["prompt"]))
        elif self._version not in prompts.VERSIONS:
            known = ", ".join(prompts.VERSIONS)
            raise BadInput(f"there is no prompt version {self._version!r}; there are {known}")
        self._repeats = int(data.get("predictions_per_task") or 8)
        self._limit = data.get("max_tasks")
        self._renamed: dict[int, str] = {}  # tasks whose id an earlier one has
        counts = []
        taken: set[str] = set()
        for number, line in enumerate(lines):
            if self._limit is not None and number >= self._limit:
                break
            task = _parse(line)
            counts.append(self._repeats * _tests(task))
            name = _name(task, number)
            if name in taken:
                name = self._renamed[number] = f"{name}_{number:08x}"
            taken.add(name)
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

    def streams(self) -> list[tuple[Path, range]]:
        """Each file of tasks and the samples that come from it."""
        starts = [*self._starts, self._count]
        ends = [starts[min(end, len(self._starts))] for end in self._lines.ends]
        return [
            (path, range(start, end))
            for path, start, end in zip(self._lines.paths, [0, *ends], ends, strict=False)
        ]

    def digest(self) -> str:
        asked = self._version if self._template is None else asdict(self._template)
        settings = (self._encoder_name, asked, self._repeats, self._limit, self._seed)
        return self._lines.digest(*settings)

    def _samples(self, number: int, line: bytes, wanted: range) -> list[Sample]:
        task = _parse(line)
        wrong = "not JSON" if task is None else tasks.task_error(task)
        name = self._renamed.get(number) or _name(task, number)
        if wrong:
            return [
                Sample(index=index, id=f"{name}/{index}", skip_reason=wrong) for index in wanted
            ]
        task = {**task, "task_id": name}
        tests = len(task["test"])
        made: dict[int, Made] = {}
        try:
            return [
                self._sample(number, task, index, divmod(index - self._starts[number], tests), made)
                for index in wanted
            ]
        except BadInput as error:  # this task lacks what the prompt shows; others may have it
            return [
                Sample(index=index, id=f"{name}/{index}", skip_reason=str(error))
                for index in wanted
            ]

    def _sample(
        self,
        number: int,
        task: Mapping[str, Any],
        index: int,
        place: tuple[int, int],
        made: dict[int, Made],
    ) -> Sample:
        turn, test = place
        if turn not in made:
            change = tasks.make_augmentation(task, turn, Random(f"{self._seed}/{number}/{turn}"))
            changed = tasks.apply_augmentation(task, change)
            made[turn] = change, self._prompts(changed)
        change, asked = made[turn]
        name = task["task_id"]
        return Sample(
            index=index,
            id=f"{name}/{turn}/{test}",
            messages=asked[test].messages(),
            answer=asked[test].answer,
            metadata={"task_id": name, "test": test, "augmentation": change.to_json()},
        )

    def _prompts(self, task: Mapping[str, Any]) -> list[prompts.Prompt]:
        if self._template is not None:
            return self._template.prompts(task, self._encode)
        return prompts.build_prompts(task, self._encode, self._version)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _name(task: Any, number: int) -> str:
    given = task.get("task_id") if isinstance(task, dict) else None
    return str(given) if given else tasks.task_id(number)


def _tests(task: Any) -> int:
    """How many tests a task has; an unreadable task still counts as one, so numbers stay put."""
    if not isinstance(task, dict) or not isinstance(task.get("test"), list):
        return 1
    return max(len(task["test"]), 1)
