"""Stored rows in a random order over the whole dataset, in batches: for training on activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tpufleet.errors import BadInput

if TYPE_CHECKING:
    from tpufleet.workloads.activations.io.datasets import Dataset

READERS = 8  # blocks read concurrently


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

        def begin(numbers: Sequence[int]) -> list[Future[RowBatch]]:
            return [readers.submit(_read, dataset, sites, blocks[n]) for n in numbers]

        def gather(rows: np.ndarray) -> RowBatch:
            """Rows by number, from as few blocks as hold them."""
            found = np.searchsorted(ends, rows, side="right") - 1
            needed, places = np.unique(found, return_inverse=True)
            sizes = ends[needed + 1] - ends[needed]
            within = rows - ends[found] + (np.cumsum(sizes) - sizes)[places]
            return _take(_join([future.result() for future in begin(needed.tolist())]), within)

        pending: list[Future[RowBatch]] = []
        for first in range(0, len(blocks), together):
            last = min(first + together, len(blocks))
            pool = np.concatenate([rest, np.arange(ends[first], ends[last])])
            order = random.permutation(len(pool))
            count = len(pool) // batch
            left = order[count * batch :]
            if skip >= max(count, 1):
                skip -= count
                rest, kept = pool[left], None
                continue
            parts = [future.result() for future in pending or begin(range(first, last))]
            pending = begin(range(last, min(last + together, len(blocks))))
            values = _join([kept or gather(rest), *parts] if len(rest) else parts)
            for number in range(skip, count):
                yield _take(values, order[number * batch : (number + 1) * batch])
            skip = 0
            rest, kept = pool[left], _take(values, left)
        if len(rest) and not skip:
            yield kept or gather(rest)


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


def _read(dataset: Dataset, sites: tuple[str, ...], block: _Block) -> RowBatch:
    return RowBatch(
        # Copied, so that the pages of a local file are read in this thread.
        values={site: np.array(dataset.rows(*block[:2], site, *block[2:])) for site in sites},
        tokens=np.array(dataset.row_tokens(*block)),
        positions=np.array(dataset.row_positions(*block)),
        samples=dataset.row_samples(*block),
    )


def _join(parts: Sequence[RowBatch]) -> RowBatch:
    sites = parts[0].values
    return RowBatch(
        {site: np.concatenate([part.values[site] for part in parts]) for site in sites},
        *(np.concatenate([part[n] for part in parts]) for n in (1, 2, 3)),
    )


def _take(rows: RowBatch, numbers: np.ndarray) -> RowBatch:
    return RowBatch(
        {site: values[numbers] for site, values in rows.values.items()},
        tokens=rows.tokens[numbers],
        positions=rows.positions[numbers],
        samples=rows.samples[numbers],
    )
