"""Statistics of stored activations, gathered while they are written: mean, norm, maximum.

Sums are taken over blocks of rows at fixed places, in order, so the result does not depend on how
rows arrive or on the number of threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
_scratch = threading.local()  # memory of each thread: rows of a tile, and values as float32
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
    arrived."""
    total = np.zeros(parts[0].shape[1], np.float64)
    norms, largest, finite_rows, nonfinite = 0.0, 0.0, 0, 0
    with np.errstate(over="ignore"):  # squares and sums of values near the largest float
        for tile in _tiles(parts, scales):
            magnitude, count = _largest_magnitude(tile), 0
            if magnitude >= _BITS[tile.dtype.name][2]:
                tile, count = _without_nonfinite(tile)
                magnitude = _largest_magnitude(tile)
            squares = np.zeros(len(tile), np.float32)
            for columns, values in _float32_columns(tile):
                squares += _row_squares(values)
                total[columns] += np.add.reduce(values, axis=0)
            norms += float(np.sqrt(squares).sum(dtype=np.float64))
            largest = max(largest, _magnitude_as_float(magnitude, tile.dtype))
            finite_rows += len(tile)
            nonfinite += count
    return _BlockSums(
        rows=sum(map(len, parts)),
        total=total,
        norms=norms,
        finite_rows=finite_rows,
        max=largest,
        nonfinite=nonfinite,
    )


def _tiles(parts: Sequence[np.ndarray], scales: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """The rows of all parts, so many at a time: in place, or copied together where a part ends.
    Each tile is valid until the next one. int8 rows are multiplied by their scales."""
    height = max(TILE // max(parts[0][:1].nbytes, 1), 1)
    factors = np.concatenate(scales) if scales else None
    at = 0
    for rows in _divide(parts, height):
        tile = _contiguous(rows)
        if factors is not None:
            memory = _memory("scaled", 4 * tile.size).view(np.float32).reshape(tile.shape)
            tile = np.multiply(tile, factors[at : at + len(tile), None], out=memory)
        at += len(tile)
        yield tile


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


def _contiguous(rows: Sequence[np.ndarray]) -> np.ndarray:
    """One array. NumPy copies bytes faster than bfloat16, and lets other threads run."""
    if len(rows) == 1:
        return np.ascontiguousarray(rows[0])
    dtype, width = rows[0].dtype, rows[0].shape[1]
    height = sum(map(len, rows))
    memory = _memory("rows", height * width * dtype.itemsize).view(dtype).reshape(height, width)
    bits = np.dtype(f"u{dtype.itemsize}")
    np.concatenate([part.view(bits) for part in rows], out=memory.view(bits))
    return memory


def _memory(name: str, size: int) -> np.ndarray:
    """So many bytes, which this thread has once under this name."""
    known: np.ndarray | None = getattr(_scratch, name, None)
    if known is None or known.size < size:
        known = np.empty(size, np.uint8)
        setattr(_scratch, name, known)
    return known[:size]


def _row_squares(values: np.ndarray) -> np.ndarray:
    """The sum of squares of each row."""
    if values.shape[1] > LONGEST_DOT:
        return np.einsum("ij,ij->i", values, values)
    squares: np.ndarray = np.matmul(values[:, None, :], values[:, :, None])[:, 0, 0]
    return squares


def _largest_magnitude(rows: np.ndarray) -> int:
    """The largest bits without the sign. Those of a sign alone are of the most negative value."""
    kind, mask, _ = _BITS[rows.dtype.name]
    bits = rows.view(kind)
    positive = np.maximum.reduce(bits.view(np.dtype(kind).str.replace("u", "i")), None, initial=0)
    negative = np.maximum.reduce(bits, None, initial=0)
    return max(int(positive), int(negative) & mask if int(negative) > mask else 0)


def _magnitude_as_float(magnitude: int, dtype: np.dtype[Any]) -> float:
    return float(np.array([magnitude], _BITS[dtype.name][0]).view(dtype)[0])


def _without_nonfinite(rows: np.ndarray) -> tuple[np.ndarray, int]:
    """The rows whose values are all finite, and how many values are not."""
    kind, mask, infinity = _BITS[rows.dtype.name]
    bad = (rows.view(kind) & kind(mask)) >= infinity
    return rows[~bad.any(axis=1)], int(bad.sum())


def _float32_columns(rows: np.ndarray) -> Iterable[tuple[slice, np.ndarray]]:
    """The values as float32, with the columns that they are from. bfloat16 is the upper half of a
    float32, so two neighbours are taken apart without a conversion."""
    if rows.dtype.name != "bfloat16" or rows.shape[1] % 2:
        yield slice(None), as_float32(rows)
        return
    pairs = rows.view(np.dtype("<u4"))
    values = _memory("values", pairs.nbytes).view(np.uint32).reshape(pairs.shape)
    np.left_shift(pairs, np.uint32(16), out=values)
    yield slice(0, None, 2), values.view(np.float32)
    np.bitwise_and(pairs, np.uint32(0xFFFF0000), out=values)
    yield slice(1, None, 2), values.view(np.float32)


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
