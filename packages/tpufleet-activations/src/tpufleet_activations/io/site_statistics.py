"""Statistics of stored activations, gathered while they are written: mean, norm, maximum.

Sums are taken over blocks of rows at fixed places, in order, so the result does not depend on how
rows arrive or on the number of threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpufleet_activations.io.shards import PIECE

# Bytes whose sums are one task.
BLOCK = 4 * PIECE
# Bytes whose sums are taken together: with their values as float32 they stay in a core's cache for
# all passes. After each call of NumPy a thread waits for the interpreter's lock, so not fewer.
TILE = 2 << 20
# BLAS divides longer dot products among threads of its own, which would wait for each other.
LONGEST_DOT = 10_000
_scratch = threading.local()  # memory of each thread, for a tile


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


@dataclass(frozen=True, kw_only=True, slots=True)
class TileSums:
    """Sums over the rows of tiles, taken elsewhere: consecutive rows of one sample each."""

    rows: np.ndarray  # [tiles]
    totals: np.ndarray  # [tiles, width]: by dimension, of rows that are finite
    # [tiles, 4]: sum of norms, largest magnitude, finite rows, values that are not finite
    figures: np.ndarray

    def __getitem__(self, tiles: slice | np.ndarray) -> TileSums:
        return TileSums(
            rows=self.rows[tiles], totals=self.totals[tiles], figures=self.figures[tiles]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _BlockSums:
    """Sums over consecutive rows."""

    rows: int
    total: np.ndarray  # by dimension
    norms: float
    finite_rows: int
    max: float
    nonfinite: int


def _sum_block(parts: Sequence[np.ndarray], scales: Sequence[np.ndarray]) -> _BlockSums:
    """Sums over the rows of all parts, in tiles at fixed places: they do not depend on how rows
    arrived. int8 rows are multiplied by their scales."""
    width, at = parts[0].shape[1], 0
    factors = np.concatenate(scales) if scales else None
    total = np.zeros(width, np.float64)
    norms, largest, finite_rows, nonfinite = 0.0, 0.0, 0, 0
    height = max(TILE // max(parts[0][:1].nbytes, 1), 1)
    with np.errstate(over="ignore"):  # squares and sums of values near the largest float
        for rows in _divide(parts, height):
            values = _as_float32_tile(rows, width)
            if factors is not None:
                values *= factors[at : at + len(values), None]
            at += len(values)
            magnitude = _largest_magnitude(values)
            if not math.isfinite(magnitude):
                finite = np.isfinite(values)
                nonfinite += finite.size - int(np.count_nonzero(finite))
                values = values[finite.all(axis=1)]
                magnitude = _largest_magnitude(values)
            total += np.add.reduce(values, axis=0)
            norms += float(np.sqrt(_row_squares(values)).sum(dtype=np.float64))
            largest = max(largest, magnitude)
            finite_rows += len(values)
    return _BlockSums(
        rows=at,
        total=total,
        norms=norms,
        finite_rows=finite_rows,
        max=largest,
        nonfinite=nonfinite,
    )


def _divide(parts: Sequence[np.ndarray], height: int) -> Iterator[list[np.ndarray]]:
    """Consecutive rows of the parts, `height` at a time."""
    rows: list[np.ndarray] = []
    room = height
    for part in parts:
        while len(part):
            rows.append(part[:room])
            part = part[room:]
            room -= len(rows[-1])
            if not room:
                yield rows
                rows, room = [], height
    if rows:
        yield rows


def _as_float32_tile(parts: Sequence[np.ndarray], width: int) -> np.ndarray:
    """The rows of all parts, valid until the next tile of this thread."""
    size = sum(map(len, parts)) * width
    if getattr(_scratch, "values", np.empty(0)).size < size:
        _scratch.values = np.empty(size, np.float32)
    values: np.ndarray = _scratch.values[:size].reshape(-1, width)
    at = 0
    for part in parts:
        target = values[at : at + len(part)]
        if part.dtype.name == "bfloat16":  # the upper half of a float32
            np.left_shift(part.view(np.uint16), 16, out=target.view(np.uint32), dtype=np.uint32)
        else:
            np.copyto(target, part)
        at += len(part)
    return values


def _row_squares(values: np.ndarray) -> np.ndarray:
    """The sum of squares of each row."""
    if values.shape[1] > LONGEST_DOT:
        return np.einsum("ij,ij->i", values, values)
    squares: np.ndarray = np.matmul(values[:, None, :], values[:, :, None])[:, 0, 0]
    return squares


def _largest_magnitude(values: np.ndarray) -> float:
    """Infinite or NaN if a value is."""
    return max(float(values.max(initial=0.0)), -float(values.min(initial=0.0)))


class StatisticsGatherer:
    """Gathers the statistics of one site of one file."""

    def __init__(self, width: int, row_bytes: int, submit: Callable[..., Future[Any]]):
        self._width, self._submit = width, submit
        self._height = max(BLOCK // max(row_bytes, 1), 1)  # rows of a block
        self._blocks: list[Future[_BlockSums]] = []
        self._open: list[np.ndarray] = []  # rows of the last block
        self._open_scales: list[np.ndarray] = []
        self._rows = 0
        self._tiles: list[TileSums] = []

    def add(self, parts: Sequence[np.ndarray], scales: Sequence[np.ndarray] | None = None) -> None:
        """Add rows in order, which must not change; `scales` of int8 rows are divided like them."""
        for number, part in enumerate(parts):
            start = 0
            while start < len(part):
                stop = start + self._height - self._rows % self._height
                self._open.append(part[start:stop])
                if scales is not None:
                    self._open_scales.append(scales[number][start:stop])
                self._rows += len(self._open[-1])
                start = stop
                if self._rows % self._height == 0:
                    self._close_block()

    def add_sums(self, tiles: TileSums) -> None:
        """Add the sums of rows instead of the rows: for a file always, or never."""
        self._tiles.append(tiles)

    def _close_block(self) -> None:
        self._blocks.append(self._submit(_sum_block, self._open, self._open_scales))
        self._open, self._open_scales = [], []

    def finish(self) -> tuple[SiteStatistics, np.ndarray]:
        """The statistics, and the mean of each dimension."""
        if self._open:
            self._close_block()
        blocks = [block.result() for block in self._blocks]
        if self._tiles:
            blocks.append(_combine_tiles(self._tiles))
        totals = [np.zeros(self._width), *(block.total for block in blocks)]
        total = np.add.reduce(totals, axis=0, dtype=np.float64)
        finite = sum(block.finite_rows for block in blocks)
        mean = total / max(finite, 1)
        statistics = SiteStatistics(
            rows=sum(block.rows for block in blocks),
            finite_rows=finite,
            mean=float(mean.mean()) if self._width else 0.0,
            norm=sum(block.norms for block in blocks) / max(finite, 1),
            max=max((block.max for block in blocks), default=0.0),
            nonfinite=sum(block.nonfinite for block in blocks),
        )
        return statistics, mean.astype(np.float32)


def _combine_tiles(parts: Sequence[TileSums]) -> _BlockSums:
    """In order, so the result does not depend on how tiles arrived."""
    norms, _, finite, nonfinite = np.concatenate([part.figures for part in parts]).T
    return _BlockSums(
        rows=int(sum(part.rows.sum() for part in parts)),
        total=np.add.reduce(
            np.concatenate([part.totals for part in parts]), axis=0, dtype=np.float64
        ),
        norms=math.fsum(norms.tolist()),
        finite_rows=int(finite.sum(dtype=np.float64)),
        max=float(max(part.figures[:, 1].max(initial=0.0) for part in parts)),
        nonfinite=int(nonfinite.sum(dtype=np.float64)),
    )


def as_float32(values: np.ndarray) -> np.ndarray:
    """As `astype(float32)`, which is slow for bfloat16."""
    if values.dtype.name != "bfloat16":
        return values.astype(np.float32, copy=False)
    wide = np.ascontiguousarray(values).view(np.uint16).astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)
