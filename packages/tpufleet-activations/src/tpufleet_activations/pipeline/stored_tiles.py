"""The stored rows of a batch in tiles, which the devices sum: see `model.row_sums`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tpufleet_activations.inputs.contexts import Context
from tpufleet_activations.model.batch import Batch, SampleSpan, most_samples

TILE = 64  # rows
ABSENT = -1


def with_tiles(batch: Batch, contexts: Sequence[Context], parts: int) -> Batch:
    """The batch with the places of its stored rows, [parts, tiles, TILE], counted within each of
    its `parts`. A tile has rows of one sample, and each sample begins a tile."""
    height, length = len(batch.tokens) // parts, batch.tokens.shape[1]
    places: list[list[np.ndarray]] = [[] for _ in range(parts)]
    for span in batch.spans:
        part, row = divmod(span.row, height)
        stored = _stored_places(contexts[span.sample], row * length + span.start)
        padded = np.full(_tiles(len(stored)) * TILE, ABSENT, np.int32)
        padded[: len(stored)] = stored
        places[part].append(padded)
    needed = max(sum(map(len, part)) for part in places) // TILE
    tiles = np.full((parts, _room(batch, height, needed), TILE), ABSENT, np.int32)
    for number, stored_places in enumerate(places):
        flat = np.concatenate([np.empty(0, np.int32), *stored_places])
        tiles[number].reshape(-1)[: len(flat)] = flat
    return replace(batch, tiles=tiles)


def without_rows(batch: Batch, parts: int) -> Batch:
    """A batch of the same shapes as `with_tiles` gives it, whose sums are of no rows."""
    room = _room(batch, len(batch.tokens) // parts, 0)
    return replace(batch, tiles=np.full((parts, room, TILE), ABSENT, np.int32))


def tile_rows(spans: Sequence[SampleSpan], contexts: Sequence[Context]) -> np.ndarray:
    """[tiles, 2]: the number in `spans` of each tile's sample, and its rows; of the spans of a part
    of a batch, in order."""
    table = [
        (number, min(TILE, rows - start))
        for number, span in enumerate(spans)
        for rows in [_stored_count(contexts[span.sample])]
        for start in range(0, rows, TILE)
    ]
    return np.array(table, np.int64).reshape(-1, 2)


def _room(batch: Batch, height: int, needed: int) -> int:
    """As many tiles for every batch of a shape, since each number of tiles is another program;
    more only for packed rows of very short samples."""
    length = batch.tokens.shape[1]
    room = height * _tiles(length)
    if batch.segments is not None:
        room += height * most_samples(length)
    while room < needed:
        room *= 2
    return room


def _tiles(rows: int) -> int:
    return -(-rows // TILE)


def _stored_count(context: Context) -> int:
    return sum(stop - start for start, stop in context.runs)


def _stored_places(context: Context, origin: int) -> np.ndarray:
    runs = [np.arange(origin + start, origin + stop) for start, stop in context.runs]
    return np.concatenate([np.empty(0, np.int64), *runs])
