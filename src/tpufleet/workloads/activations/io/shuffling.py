"""Stored rows in a random order over the whole dataset, in batches: for training on activations."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tpufleet.errors import BadInput

if TYPE_CHECKING:
    from tpufleet.workloads.activations.io.datasets import Dataset

READERS = 8  # blocks read concurrently
AHEAD = 2  # batches put together before they are asked for


class RowBatch(NamedTuple):
    """Rows of several sites, and where they come from. All arrays have the same length."""

    values: Mapping[str, np.ndarray]  # site: [rows, width]
    tokens: np.ndarray
    positions: np.ndarray  # within the sample
    samples: np.ndarray  # index of the sample


class _Block(NamedTuple):
    """Consecutive rows of one file of a unit."""

    unit: int
    file: int
    start: int
    stop: int


def shuffled_rows(
    dataset: Dataset, site: str, *, batch: int, **options: int
) -> Iterator[np.ndarray]:
    """The values of `shuffled_batches` for one site."""
    for rows in shuffled_batches(dataset, [site], batch=batch, **options):
        yield rows.values[site]


def shuffled_batches(
    dataset: Dataset,
    sites: Sequence[str],
    *,
    batch: int,
    seed: int = 0,
    block: int = 256,
    blocks_in_memory: int = 256,
    rank: int = 0,
    world_size: int = 1,
    skip: int = 0,
) -> Iterator[RowBatch]:
    """Every stored row once, shuffled over the dataset.

    Blocks of consecutive rows are read in random order and shuffled in memory, so that reads stay
    sequential; the next blocks are read ahead. The same seed gives the same order. Each rank gets
    its own rows, as many as every other, so that all ranks take the same number of steps: of the
    stored rows, the last `rows % world_size` of the shuffled order are dropped.

    `skip` leaves out the first batches without reading them: a training run that took so many
    steps continues exactly where it was.
    """
    if batch < 1 or block < 1 or blocks_in_memory < 1 or not 0 <= rank < world_size or skip < 0:
        raise BadInput("batch and blocks must be positive, and rank less than world_size")
    for site in sites:
        if site not in dataset.sites:
            raise dataset.missing_site_error(site)
    return _batches(
        dataset,
        tuple(sites),
        _own_blocks(dataset, block, seed, rank, world_size),
        np.random.default_rng((seed, rank)),
        batch,
        blocks_in_memory,
        skip,
    )


def _batches(
    dataset: Dataset,
    sites: tuple[str, ...],
    blocks: list[_Block],
    random: np.random.Generator,
    batch: int,
    together: int,
    skip: int,
) -> Iterator[RowBatch]:
    ends = np.cumsum([0, *(one.stop - one.start for one in blocks)])
    rest, kept = np.empty(0, np.int64), None  # rows left over, by number; their values, if read
    with ThreadPoolExecutor(READERS) as readers:

        def gather(rows: np.ndarray) -> RowBatch:
            """Rows by number, from as few blocks as hold them."""
            found = np.searchsorted(ends, rows, side="right") - 1
            needed, places = np.unique(found, return_inverse=True)
            sizes = ends[needed + 1] - ends[needed]
            within = rows - ends[found] + (np.cumsum(sizes) - sizes)[places]
            return _take(_Pool(dataset, sites, [blocks[n] for n in needed], readers).rows(), within)

        pending: _Pool | None = None
        spare: RowBatch | None = None
        for first in range(0, len(blocks), together):
            last = min(first + together, len(blocks))
            numbers = np.concatenate([rest, np.arange(ends[first], ends[last])])
            order = random.permutation(len(numbers))
            count = len(numbers) // batch
            left = order[count * batch :]
            if skip >= max(count, 1):
                skip -= count
                rest, kept = numbers[left], None
                continue
            pool = pending or _Pool(dataset, sites, blocks[first:last], readers)
            pending = _Pool(dataset, sites, blocks[last : last + together], readers, spare)
            before = (kept or gather(rest)) if len(rest) else None
            values = pool.rows()
            cuts = [order[n * batch : (n + 1) * batch] for n in range(skip, count)]
            # The next batches are put together while this one is used.
            ahead: deque[Future[RowBatch]] = deque()
            for number in range(len(cuts) + AHEAD):
                if number < len(cuts):
                    ahead.append(readers.submit(_take_two, before, values, cuts[number]))
                if number >= AHEAD:
                    yield ahead.popleft().result()
            skip = 0
            rest, kept = numbers[left], _take_two(before, values, left)
            spare = values  # all batches are copies
        if len(rest) and not skip:
            yield kept or gather(rest)


class _Pool:
    """Blocks that are being read into memory, each by a thread into its place."""

    def __init__(
        self,
        dataset: Dataset,
        sites: tuple[str, ...],
        blocks: list[_Block],
        readers: Executor,
        spare: RowBatch | None = None,
    ):
        """`spare` is memory of an earlier pool, which is used again if it is large enough."""
        height = sum(block.stop - block.start for block in blocks)
        if spare is None or len(spare.tokens) < height:
            widths, dtype = dataset.plan.widths, dataset.row_dtype
            spare = RowBatch(
                {site: np.empty((height, widths[site]), dtype) for site in sites},
                *(np.empty(height, kind) for kind in (np.int32, np.int32, np.int64)),
            )
        self._rows = spare
        starts = accumulate((block.stop - block.start for block in blocks), initial=0)
        self._reading = [
            readers.submit(_read, dataset, block, self._rows, start)
            for start, block in zip(starts, blocks, strict=False)
        ]

    def rows(self) -> RowBatch:
        for reading in self._reading:
            reading.result()
        return self._rows


def _own_blocks(dataset: Dataset, size: int, seed: int, rank: int, world_size: int) -> list[_Block]:
    blocks = [
        _Block(unit, file, start, min(start + size, dataset.row_count(unit, file)))
        for unit in sorted(dataset.commits)
        for file in range(len(dataset.files(unit)))
        for start in range(0, dataset.row_count(unit, file), size)
    ]
    blocks = [blocks[n] for n in np.random.default_rng(seed).permutation(len(blocks))]
    each = sum(block.stop - block.start for block in blocks) // world_size
    return _cut(blocks, rank * each, (rank + 1) * each)


def _cut(blocks: list[_Block], start: int, stop: int) -> list[_Block]:
    """The blocks that hold rows start … stop of all blocks in order, cut at both ends."""
    chosen: list[_Block] = []
    at = 0
    for block in blocks:
        height = block.stop - block.start
        low, high = max(start - at, 0), min(stop - at, height)
        if low < high:
            chosen.append(block._replace(start=block.start + low, stop=block.start + high))
        at += height
    return chosen


def _read(dataset: Dataset, block: _Block, rows: RowBatch, at: int) -> None:
    """Read a block to its place in `rows`."""
    place = slice(at, at + block.stop - block.start)
    for site, values in rows.values.items():
        stored = dataset.rows(*block[:2], site, *block[2:])
        _bits(values)[place] = _bits(stored)
    rows.tokens[place] = dataset.row_tokens(*block)
    rows.positions[place] = dataset.row_positions(*block)
    rows.samples[place] = dataset.row_samples(*block)


def _bits(values: np.ndarray) -> np.ndarray:
    """The same memory as integers: numpy copies those many times faster than bfloat16, and lets
    other threads run."""
    return values.view(np.dtype(f"u{values.dtype.itemsize}"))


def _take_two(before: RowBatch | None, rows: RowBatch, numbers: np.ndarray) -> RowBatch:
    """Rows by their number in both, one after the other."""
    if before is None:
        return _take(rows, numbers)
    height = len(before.tokens)
    early = numbers < height
    taken = _take(rows, np.where(early, 0, numbers - height))
    old = _take(before, numbers[early])
    for site, values in taken.values.items():
        _bits(values)[early] = _bits(old.values[site])
    for target, source in zip(taken[1:], old[1:], strict=True):
        target[early] = source
    return taken


def _take(rows: RowBatch, numbers: np.ndarray) -> RowBatch:
    return RowBatch(
        {
            site: np.take(_bits(values), numbers, axis=0).view(values.dtype)
            for site, values in rows.values.items()
        },
        tokens=np.take(rows.tokens, numbers),
        positions=np.take(rows.positions, numbers),
        samples=np.take(rows.samples, numbers),
    )
