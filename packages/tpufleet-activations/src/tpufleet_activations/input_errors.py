"""Errors that several modules raise in the same words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from tpufleet.errors import BadInput


def check_choice(what: str, value: object, choices: Collection[object]) -> None:
    """Raise unless it is one of the choices."""
    if value not in choices:
        raise BadInput(f"{what} {value!r} is not one of {', '.join(map(str, choices))}")


def check_shape(name: str, stored: Sequence[int], expected: Sequence[int]) -> None:
    """Of a weight."""
    if tuple(stored) != tuple(expected):
        raise BadInput(
            f"{name} has shape {list(stored)}, expected {list(expected)} from config.json"
        )


def no_split(path: str | Path, split: str | None, splits: Sequence[str]) -> BadInput:
    what = f"no split {split!r}" if split else "several splits"
    choice = f"choose one with --split: {', '.join(splits)}" if splits else "omit --split"
    return BadInput(f"{path} has {what}; {choice}")
