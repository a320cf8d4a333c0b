"""Stored rows in a random order over the whole dataset, in batches: for training on activations."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import accumulate, islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from tpufleet.errors import BadInput, Conflict
from tpufleet_activations import plans
from tpufleet_activations.io import dtypes, scattered_reads, shards
from tpufleet_activations.io.aligned_memory import MemoryPool
from tpufleet_activations.io.dataset_reader import Dataset, RowSpan

READERS = 8  # blocks read concurrently
TASKS = 4 * READERS  # that the blocks of a round are divided into


class RowBatch(NamedTuple):
    """Rows of several sites, and where they come from. All arrays have the same length."""

    values: Mapping[str, np.ndarray]  # site: [rows, width]
    tokens: np.ndarray
    positions: np.ndarray  # within the sample
    samples: np.ndarray  # index of the sample


class RowSource(Protocol):
    """What rows are read from: a dataset, or an extraction that is running."""

    memory: MemoryPool

    @property
    def plan(self) -> plans.ExtractionPlan: ...

    def rows(self, unit: int, file: Any, name: str, start: int, stop: int) -> np.ndarray: ...

    def row_samples(self, unit: int, file: Any, start: int, stop: int) -> np.ndarray: ...

    def read_rows_to(self, unit: int, file: Any, site: str, start: int, rows: np.ndarray) -> bool:
        """False if they have to be copied from `rows`."""


def shuffled_rows(
    dataset: Dataset, site: str, *, batch: int, **options: Any
) -> Iterator[np.ndarray]:
    """The values of `shuffled_batches` for one site."""
    batches = shuffled_batches(dataset, site, batch=batch, labelled=False, **options)
    return (rows.values[site] for rows in batches)


def shuffled_batches(
    dataset: Dataset,
    sites: str | Sequence[str],
    *,
    batch: int,
    seed: int = 0,
    block: int = 256,
    blocks_in_memory: int = 256,
    rank: int = 0,
    world_size: int = 1,
    skip: int = 0,
    expected: str = "",
    labelled: bool = True,
) -> Iterator[RowBatch]:
    """Every stored row of one or several sites once, shuffled over the dataset.

    Blocks of consecutive rows are read in random order and shuffled in memory, so that reads stay
    sequential; the next blocks are read ahead. The same seed gives the same order. Each rank gets
    its own rows, as many as every other, so that all ranks take the same number of steps: of the
    stored rows, the last `rows % world_size` of the shuffled order are dropped.

    The first batches hold rows of few samples: of `blocks_in_memory` blocks of `block` rows. Larger
    numbers of smaller blocks shuffle better, and read more slowly.

    `skip` leaves out the first batches without reading them: a training run that took so many
    steps continues exactly where it was, if the dataset has the same rows. `expected` is the
    `Dataset.fingerprint` of the earlier steps: with others, which give another order, Conflict is
    raised. Without `labelled`, tokens, positions and samples are not read, and empty.
    """
    sites = [sites] if isinstance(sites, str) else sites
    sizes = {"batch": batch, "block": block, "blocks_in_memory": blocks_in_memory}
    sizes["number of sites"] = len(sites)
    check_order(sizes, {"skip": skip, "seed": seed}, rank, world_size)
    for site in sites:
        if site not in dataset.sites:
            raise dataset.missing_site_error(site)
    dataset.check_records()
    if expected and expected != dataset.fingerprint:
        raise Conflict(
            "the dataset has other rows than in the earlier run, so their order is another: "
            f"{len(dataset.commits)} of {dataset.plan.units} units are committed now; start over, "
            "and only when the dataset is complete"
        )
    blocks = _own_blocks(dataset, block, seed, rank, world_size)
    batch = max(min(batch, sum(one.height for one in blocks)), 1)  # no memory for more
    random = np.random.default_rng((seed, rank))
    return read_rounds(
        RowReader(dataset, tuple(sites), batch, labelled),
        _rounds(blocks, random, batch, blocks_in_memory, skip),
    )


def check_order(
    sizes: Mapping[str, int], numbers: Mapping[str, int], rank: int, world_size: int
) -> None:
    """Sizes are at least 1, and numbers at least 0."""
    least = dict.fromkeys({**sizes, "world_size": world_size}, 1)
    for name, value in {**sizes, **numbers, "world_size": world_size, "rank": rank}.items():
        if value < least.get(name, 0) or (name == "rank" and rank >= world_size):
            below = f", below world_size {world_size}" if name == "rank" else ""
            raise BadInput(f"{name} is {value}, expected at least {least.get(name, 0)}{below}")


class Round(NamedTuple):
    """Blocks whose rows are shuffled together, with rows that the round before left over."""

    blocks: list[RowSpan]
    # Of the rows left over before and those of the blocks, in the shuffled order.
    order: np.ndarray
    before: int  # rows left over before
    batches: int  # complete ones; the rest is left over
    skipped: int  # of the batches, that are not read


def _rounds(
    blocks: list[RowSpan], random: np.random.Generator, batch: int, together: int, skip: int
) -> Iterator[Round]:
    """Without those that are skipped as a whole."""
    ends = np.cumsum([0, *(one.height for one in blocks)])
    rest, read = np.empty(0, np.int64), True  # rows left over, by number; whether a round has them
    for first in range(0, len(blocks), together):
        last = min(first + together, len(blocks))
        numbers = np.concatenate([rest, np.arange(ends[first], ends[last])])
        order = random.permutation(len(numbers))
        count = len(numbers) // batch
        left = numbers[order[count * batch :]]
        if skip >= max(count, 1):
            skip, rest, read = skip - count, left, False
            continue
        if len(rest) and not read:
            yield _left_over(blocks, ends, rest)
        yield Round(blocks[first:last], order, len(rest), count, skip)
        skip, rest, read = 0, left, True
    if len(rest) and not read and not skip:
        yield _left_over(blocks, ends, rest)


def _left_over(blocks: list[RowSpan], ends: np.ndarray, rows: np.ndarray) -> Round:
    """A round that only leaves these rows over, by number: skipped rounds would have."""
    found = np.searchsorted(ends, rows, side="right") - 1
    needed, places = np.unique(found, return_inverse=True)
    sizes = ends[needed + 1] - ends[needed]
    within = rows - ends[found] + (np.cumsum(sizes) - sizes)[places]
    return Round([blocks[n] for n in needed], within, 0, 0, 0)


def read_rounds(reader: RowReader, rounds: Iterator[Round]) -> Generator[RowBatch, None, None]:
    rest: RowBatch | None = None
    is_finalizing = sys.is_finalizing  # when it says so, modules have lost their names
    threads = ThreadPoolExecutor(READERS, thread_name_prefix="shuffled-rows")
    try:
        reading = [_Reading(reader, each, threads) for each in islice(rounds, 1)]
        while reading:
            # The next round is read while the batches of this one are used.
            reading += [_Reading(reader, each, threads) for each in islice(rounds, 1)]
            batches, rest = reading.pop(0).finish(rest)
            while batches:
                yield batches.pop()  # no reference is kept, so that its memory can be used again
    finally:
        if not is_finalizing():
            threads.shutdown(cancel_futures=True)
    if rest is not None:
        yield rest


class RowReader:
    """Reads blocks of a dataset to rows in memory that is used again."""

    def __init__(self, dataset: RowSource, sites: tuple[str, ...], batch: int, labelled: bool):
        self.dataset, self.sites, self.batch, self.labelled = dataset, sites, batch, labelled

    def new_values(self, site: str) -> np.ndarray:
        """For the values of a batch."""
        width = self.dataset.plan.widths[site]
        dtype = dtypes.NUMPY_DTYPES[dtypes.site_dtype(site, self.dataset.plan.dtype)]
        memory = self.dataset.memory.take(self.batch * width * dtype.itemsize)
        return memory.view(dtype).reshape(self.batch, width)

    def read(self, block: RowSpan, site: str, vectors: np.ndarray) -> np.ndarray | None:
        """Read each row to its address. Rows that are not plain bytes of a local file are returned
        instead."""
        if self.dataset.read_rows_to(*block[:2], site, block.start, vectors):
            return None
        return self.dataset.rows(*block[:2], site, *block[2:])


class _Reading:
    """A round that is being read: each block by a thread, each row to its place in a batch."""

    def __init__(self, reader: RowReader, turn: Round, threads: Executor):
        self._reader, self._round = reader, turn
        batch, height = reader.batch, sum(block.height for block in turn.blocks)
        # Of each row in the shuffled order; -1: not needed.
        self._places = np.full(turn.before + height, -1, np.int64)
        self._places[turn.order] = np.arange(len(turn.order))
        self._places[self._places < turn.skipped * batch] = -1
        cuts = range(turn.skipped, -(-len(turn.order) // batch))
        self._values = {site: {n: reader.new_values(site) for n in cuts} for site in reader.sites}
        self._unneeded = {site: reader.new_values(site)[:1] for site in reader.sites}
        self._vectors = {site: self._vectors_of(site)[turn.before :] for site in reader.sites}
        labels = height if reader.labelled else 0
        self._tokens = np.empty(labels, np.int32)
        self._positions = np.empty(labels, np.int32)
        self._samples = np.empty(labels, np.int64)
        starts = list(accumulate((block.height for block in turn.blocks), initial=0))
        step = -(-len(turn.blocks) // TASKS)
        self._tasks = [
            threads.submit(self._read, turn.blocks[n : n + step], starts[n])
            for n in range(0, len(turn.blocks), step)
        ]

    def _vectors_of(self, site: str) -> np.ndarray:
        unneeded, values = self._unneeded[site], self._values[site]
        row_bytes, batch = unneeded.strides[0], self._reader.batch
        bases = np.zeros(max(values, default=0) + 1, np.int64)
        for number, rows in values.items():
            bases[number] = rows.ctypes.data
        numbers, rows = np.divmod(self._places, batch)
        addresses = bases[numbers] + rows * row_bytes
        addresses[self._places < 0] = unneeded.ctypes.data
        return scattered_reads.row_vectors(addresses, row_bytes)

    def _read(self, blocks: Sequence[RowSpan], at: int) -> None:
        for block in blocks:
            span = slice(at, at + block.height)
            for site, vectors in self._vectors.items():
                values = self._reader.read(block, site, vectors[span])
                if values is not None:
                    self._place(site, values, self._places[self._round.before :][span])
            if self._reader.labelled:
                dataset = self._reader.dataset
                self._tokens[span] = dataset.rows(*block[:2], shards.TOKENS, *block[2:])
                self._positions[span] = dataset.rows(*block[:2], shards.POSITIONS, *block[2:])
                self._samples[span] = dataset.row_samples(*block)
            at += block.height

    def _place(self, site: str, values: np.ndarray, places: np.ndarray) -> None:
        """Copy rows to their places in the batches."""
        numbers, rows = np.divmod(places, self._reader.batch)
        for number in np.unique(numbers[places >= 0]):
            chosen = numbers == number
            _bits(self._values[site][int(number)])[rows[chosen]] = _bits(values)[chosen]

    def finish(self, before: RowBatch | None) -> tuple[list[RowBatch], RowBatch | None]:
        """The batches, last first, and what is left over; `before` is what was left over before."""
        for task in self._tasks:
            task.result()
        labels: list[np.ndarray] = [self._tokens, self._positions, self._samples]
        turn, batch = self._round, self._reader.batch
        if before is not None:
            for site, values in before.values.items():
                self._place(site, values, self._places[: turn.before])
            earlier = [before.tokens, before.positions, before.samples]
            labels = [np.concatenate(both) for both in zip(earlier, labels, strict=True)]
        order = turn.order if self._reader.labelled else turn.order[:0]
        labels = [values[order] for values in labels]
        cuts = [
            RowBatch(
                {
                    site: values[n][: len(turn.order) - n * batch]
                    for site, values in self._values.items()
                },
                *(values[n * batch : (n + 1) * batch] for values in labels),
            )
            for n in range(turn.skipped, -(-len(turn.order) // batch))
        ]
        rest = cuts.pop() if len(turn.order) > turn.batches * batch else None
        return cuts[::-1], rest


def _own_blocks(
    dataset: Dataset, size: int, seed: int, rank: int, world_size: int
) -> list[RowSpan]:
    blocks = list(dataset.blocks(size))
    blocks = [blocks[n] for n in np.random.default_rng(seed).permutation(len(blocks))]
    each = sum(block.height for block in blocks) // world_size
    return _cut(blocks, rank * each, (rank + 1) * each)


def _cut(blocks: list[RowSpan], start: int, stop: int) -> list[RowSpan]:
    """The blocks that hold rows start … stop of all blocks in order, cut at both ends."""
    chosen: list[RowSpan] = []
    at = 0
    for block in blocks:
        low, high = max(start - at, 0), min(stop - at, block.height)
        if low < high:
            chosen.append(block._replace(start=block.start + low, stop=block.start + high))
        at += block.height
    return chosen


def _bits(values: np.ndarray) -> np.ndarray:
    """The same memory as integers: numpy copies those many times faster than bfloat16, and lets
    other threads run."""
    return values.view(np.dtype(f"u{values.dtype.itemsize}"))
