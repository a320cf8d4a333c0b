"""ARC tasks: validation, augmentation, conversion from pairs, and stream files.

A task is `{"train": [{"input", "output"}, …], "test": [{"input"}, …]}` with grids of ints 0 to 9.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tpufleet_activations.io.storage import Storage

STREAM_NAME = re.compile(r"stream_(\d{3,})\.jsonl")
Grid = list[list[int]]
Task = Mapping[str, Any]

# The eight symmetries of a square, (flip, quarter turns), in the order of a task's augmentations.
DIHEDRAL = tuple((flip, turns) for flip in (False, True) for turns in range(4))
BACKGROUND_RECOLOR_PROBABILITY = 0.1  # color 0 is usually the background and keeps its color


@dataclass(frozen=True, kw_only=True, slots=True)
class Augmentation:
    """How a task was transformed; enough to invert it."""

    flip: bool
    rotations: int
    colors: tuple[int, ...]
    train_order: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "hflip": self.flip,
            "n_rot90": self.rotations,
            "colors": list(self.colors),
            "train_order": list(self.train_order),
        }


def make_augmentation(task: Task, number: int, random: Random) -> Augmentation:
    """The task's `number`-th augmentation: symmetries in turn, colors and order at random."""
    flip, turns = DIHEDRAL[number % len(DIHEDRAL)]
    colors = list(range(10))
    if random.random() < BACKGROUND_RECOLOR_PROBABILITY:
        random.shuffle(colors)
    else:
        rest = colors[1:]
        random.shuffle(rest)
        colors = [0, *rest]
    order = list(range(len(task["train"])))
    random.shuffle(order)
    return Augmentation(flip=flip, rotations=turns, colors=tuple(colors), train_order=tuple(order))


def apply_augmentation(task: Task, change: Augmentation) -> dict[str, Any]:
    train = [task["train"][number] for number in change.train_order]
    choices = {
        name: [augment_grid(grid, change) for grid in task[name]]
        for name in ("test_output_choices",)
        if name in task
    }
    return {
        **task,
        **choices,
        "train": [_change_pair(pair, change) for pair in train],
        "test": [_change_pair(pair, change) for pair in task["test"]],
    }


def augment_grid(grid: Grid, change: Augmentation) -> Grid:
    cells = np.asarray(grid)
    if change.flip:
        cells = np.flip(cells, axis=1)
    return np.asarray(change.colors)[np.rot90(cells, k=change.rotations)].tolist()


def task_error(task: Any) -> str:
    """Why this is not a valid task; empty if it is."""
    if not isinstance(task, dict) or not task.get("train") or not task.get("test"):
        return "not a task: needs train and test pairs"
    for pair in task["train"]:
        if not (isinstance(pair, dict) and _is_grid(pair.get("input"), pair.get("output"))):
            return "not a task: a train pair lacks a grid of colors 0 to 9"
    if not all(isinstance(pair, dict) and _is_grid(pair.get("input")) for pair in task["test"]):
        return "not a task: a test has no input grid of colors 0 to 9"
    return ""


def task_from_pairs(pairs: Any, number: int) -> dict[str, Any] | None:
    """A task from a list of [input, output] pairs, the last of which becomes the test without its
    output. None if no valid pair or no valid test is left."""
    if not isinstance(pairs, list | tuple) or len(pairs) < 2:
        return None
    train = [{"input": grids[0], "output": grids[1]} for grids in map(_grids, pairs[:-1]) if grids]
    test = _grid(pairs[-1][0]) if isinstance(pairs[-1], list | tuple) and pairs[-1] else None
    if not train or test is None:
        return None
    return {"task_id": task_id(number), "train": train, "test": [{"input": test}]}


def task_id(number: int) -> str:
    return f"task_{number:08x}"


def write_streams(
    samples: Iterable[Any],
    count: int,
    folder: Path,
    *,
    max_samples: int | None = None,
    first: int = 0,
) -> dict[str, int]:
    """Write sample i to `stream_{first + i % count:03d}.jsonl`; ids are unique over all streams.

    Invalid samples are counted but not written. `max_samples` is the total over all streams.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"stream_{first + number:03d}.jsonl" for number in range(count)]
    files = [open(path, "w", encoding="utf-8") for path in paths]  # noqa: SIM115
    written = invalid = 0
    try:
        for number, pairs in enumerate(samples):
            if max_samples is not None and number >= max_samples:
                break
            task = task_from_pairs(pairs, number)
            if task is None:
                invalid += 1
                continue
            files[number % count].write(json.dumps(task) + "\n")
            written += 1
    finally:
        for file in files:
            file.close()
    return {"streams": count, "tasks": written, "invalid": invalid}


def store_streams(
    samples: Iterable[Any],
    count: int,
    storage: Storage,
    prefix: str = "",
    *,
    max_samples: int | None = None,
    first: int = 0,
) -> dict[str, int]:
    """`write_streams`, in place of all streams that are there; without a task, nothing changes."""
    with tempfile.TemporaryDirectory() as folder:
        counts = write_streams(samples, count, Path(folder), max_samples=max_samples, first=first)
        if counts["tasks"]:
            drafts = {f"{prefix}{path.name}": path for path in sorted(Path(folder).iterdir())}
            for name, draft in drafts.items():
                storage.upload(draft, name)
            for name in stored_streams(storage, prefix):
                if name not in drafts:
                    storage.delete(name)
    return counts


def stored_streams(storage: Storage, prefix: str = "") -> list[str]:
    names = storage.names(prefix)
    return [name for name in names if STREAM_NAME.fullmatch(name.removeprefix(prefix))]


def _change_pair(pair: Mapping[str, Grid], change: Augmentation) -> dict[str, Grid]:
    return {name: augment_grid(grid, change) for name, grid in pair.items()}


def _is_grid(*grids: Any) -> bool:
    return all(isinstance(grid, list) and _is_table(grid) for grid in grids)


def _is_table(rows: list[Any]) -> bool:
    """Non-empty rows of equal length, with colors 0 to 9."""
    if not all(isinstance(row, list) and row for row in rows) or len(set(map(len, rows))) != 1:
        return False
    return all(type(cell) is int and 0 <= cell <= 9 for row in rows for cell in row)


def _grids(pair: Any) -> tuple[Grid, Grid] | None:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return None
    first, second = map(_grid, pair)
    return None if first is None or second is None else (first, second)


def _grid(cells: Any) -> Grid | None:
    try:
        return [[int(cell) for cell in row] for row in cells]
    except (TypeError, ValueError):
        return None
