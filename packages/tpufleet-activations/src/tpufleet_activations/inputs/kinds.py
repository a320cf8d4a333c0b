"""Kinds of data that other distributions read: entry-point group `tpufleet.extract.data`, a mapping
of names to `DataKind`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tpufleet.entry_points import registered
from tpufleet_activations.inputs.samples import SampleSource


@dataclass(frozen=True, kw_only=True, slots=True)
class DataKind:
    """How samples of one kind are found and read."""

    # Of a path and the names there: the suffixes of files that are of this kind.
    detect: Callable[[str, Set[str]], Set[str]]
    find: Callable[[Mapping[str, Any]], Sequence[Path]]  # local files of a plan's `data`
    open: Callable[[Sequence[Path], Mapping[str, Any]], SampleSource]
    options: Set[str] = frozenset()  # names for `tpu extract plan --data-option`


@cache
def other_kinds() -> dict[str, DataKind]:
    return {
        name: kind for table in registered("tpufleet.extract.data") for name, kind in table.items()
    }
