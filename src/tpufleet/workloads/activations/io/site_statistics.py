"""Statistics of stored activations, gathered while they are written: mean, norm, maximum.

Sums are taken over blocks of rows at fixed places, in order, so the result does not depend on how
rows arrive or on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpufleet.workloads.activations.io.shards import PIECE

# float32 values converted at a time: they stay in the cache of a core.
CACHED_VALUES = 1 << 16
# Of each stored type: unsigned bits of the same size, all but the sign, and those of infinity.
_BITS: Mapping[str, tuple[Any, int, int]] = {
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
    "float16": (np.uint16, 0x7FFF, 0x7C00),
    "float32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteStatistics:
    """Of all values of a site. Rows with values that are not finite count for `rows`, `values` and
    `nonfinite` alone."""

    rows: int = 0
    finite_rows: int = 0
    mean: float = 0.0  # of all values
    norm: float = 0.0  # mean over rows of the Euclidean norm
    max: float = 0.0  # largest absolute value
    nonfinite: int = 0  # values that are infinite or not a number

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "finite_rows": self.finite_rows,
            "mean": float(f"{self.mean:.7g}"),
            "norm": float(f"{self.norm:.7g}"),
            "max": float(f"{self.max:.7g}"),
            "nonfinite": self.nonfinite,
        }


def combine(parts: Iterable[SiteStatistics]) -> SiteStatistics:
    """The statistics of all parts together."""
    known = list(parts)
    finite = sum(part.finite_rows for part in known)
    return SiteStatistics(
        rows=sum(part.rows for part in known),
        finite_rows=finite,
        mean=sum(part.mean * part.finite_rows for part in known) / max(finite, 1),
        norm=sum(part.norm * part.finite_rows for part in known) / max(finite, 1),
        max=max((part.max for part in known), default=0.0),
        nonfinite=sum(part.nonfinite for part in known),
    )


@dataclass
class _BlockSums:
    """Sums over consecutive rows."""

    total: np.ndarray | None = None  # by dimension
    norms: float = 0.0
    finite_rows: int = 0
    max: float = 0.0
    nonfinite: int = 0
    last: Future[Any] | None = field(default=None)  # the latest task that adds to it

    def add(
        self,
        rows: np.ndarray,
        scales: np.ndarray | None,
        previous: Future[Any] | None,
    ) -> None:
        if previous is not None:
            previous.result()  # submitted earlier, so a thread is already running it
        height = max(CACHED_VALUES // max(rows.shape[1], 1), 1)
        for start in range(0, len(rows), height):
            part = slice(start, start + height)
            self._add(rows[part], None if scales is None else scales[part])

    def _add(self, rows: np.ndarray, scales: np.ndarray | None) -> None:
        wide = as_float32(rows)
        if scales is not None:
            wide = wide * scales[:, None]
            rows = wide
        kind, mask, infinity = _BITS[rows.dtype.name]
        magnitude = np.ascontiguousarray(rows).view(kind) & kind(mask)
        if magnitude.max(initial=0) >= infinity:
            bad = magnitude >= infinity
            self.nonfinite += int(bad.sum())
            wide = wide[~bad.any(axis=1)]
        if not len(wide):
            return
        self.max = max(self.max, float(np.abs(wide).max()))
        self.finite_rows += len(wide)
        # Row after row, whatever the number of rows in each call: the same bits.
        joined = wide if self.total is None else np.concatenate([self.total[None], wide])
        with np.errstate(over="ignore"):  # squares and sums of values near the largest float
            self.norms += float(np.sqrt(np.einsum("ij,ij->i", wide, wide)).sum(dtype=np.float64))
            self.total = np.add.reduce(joined, axis=0)


class StatisticsGatherer:
    """Gathers the statistics of one site of one file."""

    def __init__(self, width: int, row_bytes: int, submit: Callable[..., Future[Any]]):
        self._width, self._submit = width, submit
        self._height = max(PIECE // max(row_bytes, 1), 1)  # rows of a block
        self._blocks: list[_BlockSums] = []
        self._rows = 0

    def add(self, parts: Sequence[np.ndarray], scales: Sequence[np.ndarray] | None = None) -> None:
        """Add rows in order; `scales` of int8 rows are divided like them."""
        for number, part in enumerate(parts):
            factors = None if scales is None else scales[number]
            start = 0
            while start < len(part):
                room = self._height - self._rows % self._height
                stop = min(start + room, len(part))
                self._add(part[start:stop], None if factors is None else factors[start:stop])
                start = stop

    def _add(self, rows: np.ndarray, factors: np.ndarray | None) -> None:
        continues = self._rows % self._height != 0
        if not continues:
            self._blocks.append(_BlockSums())
        block = self._blocks[-1]
        block.last = self._submit(block.add, rows, factors, block.last)
        self._rows += len(rows)

    def finish(self) -> tuple[SiteStatistics, np.ndarray]:
        """The statistics, and the mean of each dimension."""
        total = np.zeros(self._width, np.float64)
        for block in self._blocks:
            if block.last is not None:
                block.last.result()
            if block.total is not None:
                total += block.total
        finite = sum(block.finite_rows for block in self._blocks)
        mean = total / max(finite, 1)
        statistics = SiteStatistics(
            rows=self._rows,
            finite_rows=finite,
            mean=float(mean.mean()) if self._width else 0.0,
            norm=sum(block.norms for block in self._blocks) / max(finite, 1),
            max=max((block.max for block in self._blocks), default=0.0),
            nonfinite=sum(block.nonfinite for block in self._blocks),
        )
        return statistics, mean.astype(np.float32)


def as_float32(values: np.ndarray) -> np.ndarray:
    """As `astype(float32)`, which is slow for bfloat16."""
    if values.dtype.name != "bfloat16":
        return values.astype(np.float32, copy=False)
    wide = np.ascontiguousarray(values).view(np.uint16).astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)
