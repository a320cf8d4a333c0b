"""Rows in the order of `seed`, in batches, from an extraction that is running or a dataset.

Units come in a random order, and rows are shuffled within a buffer. Both depend on the plan and on
the arguments alone, so a stream and a dataset of the same plan have the same batches, and a
position is a few numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from tpufleet.errors import Conflict, unreadable
from tpufleet_activations.io import dtypes
from tpufleet_activations.io.dataset_reader import Dataset, RowSpan
from tpufleet_activations.io.datasets import open_dataset
from tpufleet_activations.io.shuffling import Round, RowBatch, RowReader, check_order, read_rounds
from tpufleet_activations.streams.live_rows import LiveRows

BUFFER = 65_536  # rows
BLOCK = 256  # rows that a thread reads at a time


def stream(
    source: str | Dataset,
    sites: str | Sequence[str],
    *,
    batch: int,
    seed: int = 0,
    buffer: int = BUFFER,
    rank: int = 0,
    world_size: int = 1,
    position: Mapping[str, Any] | None = None,
    credentials: str | None = None,
    patience: float = 600.0,
) -> RowStream:
    """Every row of the plan once, in batches; the last one may be smaller.

    `source` is the address of an extractor, `unix:/path` or `tcp://host:port` (with the folder of
    its `credentials`), or a complete dataset or its location. They have the same order.

    The units of the plan are put into the order of `seed`, and each rank takes every
    `world_size`-th of them. Rows are shuffled within `buffer` of them.

    `position` is the `RowStream.position` that was saved with the model: the stream continues after
    the batches that were taken then. After `patience` seconds without an extractor it fails.
    """
    names = tuple([sites] if isinstance(sites, str) else sites)
    sizes = {"batch": batch, "buffer": buffer, "number of sites": len(names)}
    check_order(sizes, {"seed": seed}, rank, world_size)
    opened: Dataset | LiveRows
    if isinstance(source, str) and source.startswith(("unix:", "tcp:")):
        opened = LiveRows(
            source,
            names,
            credentials=credentials,
            rank=rank,
            world_size=world_size,
            patience=patience,
        )
    else:
        opened = open_dataset(source) if isinstance(source, str) else source
        _check_complete(opened, names)
    start = Position(
        plan=opened.plan.identity,
        seed=seed,
        batch=batch,
        buffer=max(buffer // batch, 1) * batch,
        rank=rank,
        world_size=world_size,
    )
    try:
        return RowStream(opened, names, start.moved_to(position))
    except BaseException:
        if isinstance(opened, LiveRows):
            opened.close()
        raise


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Which batch comes next. Field names are the keys of a saved position."""

    plan: str
    seed: int
    batch: int
    buffer: int  # rows, of whole batches
    rank: int
    world_size: int
    batches: int = 0  # that were taken
    # Where the rows begin that are shuffled with those of the next batch: number of the unit in the
    # order of units, and its row.
    unit: int = 0
    row: int = 0

    def moved_to(self, saved: Mapping[str, Any] | None) -> Position:
        """The saved position, which has to be one of this order."""
        if saved is None:
            return self
        try:
            moved = Position(**saved)
        except TypeError as error:
            raise unreadable("the position", error) from error
        for name in ("plan", "seed", "batch", "buffer", "rank", "world_size"):
            if getattr(moved, name) != getattr(self, name):
                raise Conflict(
                    f"the position was saved with {name} {getattr(moved, name)}, and it is "
                    f"{getattr(self, name)} now; the rows would come in another order"
                )
        return moved


class _Place(NamedTuple):
    unit: int
    row: int


class RowStream(Iterator[RowBatch]):
    """An iterator of batches that knows its position."""

    def __init__(self, source: Dataset | LiveRows, sites: tuple[str, ...], start: Position):
        self._source, self._start = source, start
        plan = source.plan
        order = np.random.default_rng(start.seed).permutation(plan.units)
        self._order: list[int] = order[start.rank :: start.world_size].tolist()
        self._per_round = start.buffer // start.batch
        self._taken = start.batches
        self._begun = start.batches // self._per_round  # the round that `_places` begins with
        self._places = deque([_Place(start.unit, start.row)])  # where rounds begin
        if isinstance(source, LiveRows):
            row_bytes = dtypes.bytes_per_token({s: plan.widths[s] for s in sites}, plan.dtype)
            source.start(self._order[start.unit :], start.row, start.buffer * (row_bytes + 16))
        reader = RowReader(source, sites, start.batch, labelled=True)
        self._batches = read_rounds(reader, self._rounds())

    @property
    def position(self) -> dict[str, Any]:
        """After the batch that was taken last. JSON can hold it."""
        number = self._taken // self._per_round - self._begun
        unit, row = self._places[min(number, len(self._places) - 1)]
        taken = {"batches": self._taken, "unit": unit, "row": row}
        return asdict(self._start) | taken

    def __next__(self) -> RowBatch:
        rows = next(self._batches)
        self._taken += 1
        while len(self._places) > 1 and self._begun < self._taken // self._per_round:
            self._places.popleft()
            self._begun += 1
        return rows

    def close(self) -> None:
        self._batches.close()
        if isinstance(self._source, LiveRows):
            self._source.close()

    def __enter__(self) -> RowStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _rounds(self) -> Iterator[Round]:
        number = self._begun
        skipped = self._start.batches % self._per_round
        blocks: list[RowSpan] = []
        height = 0
        for block, place in self._blocks():
            blocks.append(block)
            height += block.height
            if height == self._start.buffer:
                self._places.append(place)
                yield self._round(number, blocks, height, skipped)
                number, blocks, height, skipped = number + 1, [], 0, 0
        if height > skipped * self._start.batch:
            self._places.append(place)
            yield self._round(number, blocks, height, skipped)

    def _round(self, number: int, blocks: list[RowSpan], height: int, skipped: int) -> Round:
        start = self._start
        order = np.random.default_rng((start.seed, start.rank, number)).permutation(height)
        return Round(blocks, order, 0, height // start.batch, skipped)

    def _blocks(self) -> Iterator[tuple[RowSpan, _Place]]:
        """Blocks of rows that end where a buffer does, and the place after each."""
        room = self._start.buffer
        for number in range(self._start.unit, len(self._order)):
            row = self._start.row if number == self._start.unit else 0
            for block in self._source.unit_blocks(self._order[number], row, BLOCK):
                rest = block
                while rest.height:
                    cut = rest._replace(stop=min(rest.stop, rest.start + room))
                    rest = rest._replace(start=cut.stop)
                    row += cut.height
                    room = (room - cut.height) or self._start.buffer
                    yield cut, _Place(number, row)


def _check_complete(dataset: Dataset, sites: Sequence[str]) -> None:
    for site in sites:
        if site not in dataset.sites:
            raise dataset.missing_site_error(site)
    dataset.check_records()
    if not dataset.complete:
        raise Conflict(
            f"{len(dataset.commits):,} of {dataset.plan.units:,} units are committed; a stream "
            "reads complete datasets: run `tpu extract run` first, or stream from it"
        )
