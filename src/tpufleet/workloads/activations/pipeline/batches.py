"""Batches of equal shape from samples of any length: few shapes, little padding, fixed order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tpufleet.errors import BadInput

BUCKETS = (64, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
TOKENS_AT_ONCE = 256  # that the kernels of a device take together
PADDING_SEGMENT = -1  # the segment of positions that hold no token


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSpan:
    """Where a sample lies in a batch."""

    sample: int  # its place in the unit
    row: int
    start: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Tokens [rows, length]. `segments` is None when each row holds one sample."""

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray | None
    spans: tuple[SampleSpan, ...]

    @property
    def real_tokens(self) -> int:
        return sum(place.length for place in self.spans)


def buckets_up_to(max_length: int) -> tuple[int, ...]:
    """Lengths that rows are padded to; beyond the table, steps of 1,024."""
    table = [*BUCKETS, *range(3072, max_length + 1024, 1024)]
    return (*(size for size in table if size < max_length), max_length)


def rows_for(length: int, batch_tokens: int, row_multiple: int) -> int:
    """Rows of a batch of this length: one shape for each length, divisible over the devices, and
    where that costs few rows with a number of tokens that kernels like."""
    rows = max(batch_tokens // length // row_multiple, 1) * row_multiple
    step = row_multiple * (TOKENS_AT_ONCE // math.gcd(length, TOKENS_AT_ONCE))
    return rows // step * step or rows


def make_batches(
    tokens: Sequence[np.ndarray],
    *,
    batching: str,
    buckets: Sequence[int],
    batch_tokens: int,
    row_multiple: int = 1,
) -> Iterator[Batch]:
    """All samples that have tokens, each in exactly one batch, the longest first.

    The order of samples does not depend on the batch size or on the number of devices.
    """
    order = sorted(
        (n for n in range(len(tokens)) if len(tokens[n])), key=lambda n: (-len(tokens[n]), n)
    )
    if order and len(tokens[order[0]]) > buckets[-1]:
        raise BadInput(
            f"{len(tokens[order[0]])} tokens do not fit the largest bucket {buckets[-1]}"
        )
    if batching == "pack":
        yield from _packed(tokens, order, buckets[-1], batch_tokens, row_multiple)
    elif batching == "bucket":
        yield from _bucketed(tokens, order, buckets, batch_tokens, row_multiple)
    else:
        raise BadInput(f"batching is {batching!r}; choose bucket or pack")


def _bucketed(
    tokens: Sequence[np.ndarray],
    order: list[int],
    buckets: Sequence[int],
    batch_tokens: int,
    multiple: int,
) -> Iterator[Batch]:
    at = 0
    while at < len(order):
        length = next(size for size in buckets if size >= len(tokens[order[at]]))
        rows = rows_for(length, batch_tokens, multiple)
        chosen = order[at : at + rows]
        at += rows
        batch = np.zeros((rows, length), np.int32)
        places = []
        for row, sample in enumerate(chosen):
            batch[row, : len(tokens[sample])] = tokens[sample]
            places.append(SampleSpan(sample=sample, row=row, start=0, length=len(tokens[sample])))
        # Padding comes after a row's tokens, where causal attention does not look.
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), batch.shape)
        yield Batch(tokens=batch, positions=positions, segments=None, spans=tuple(places))


def _packed(
    tokens: Sequence[np.ndarray], order: list[int], length: int, batch_tokens: int, multiple: int
) -> Iterator[Batch]:
    bins: list[list[int]] = []
    room: list[int] = []
    first = 0  # bins before it are too full for the shortest sample
    shortest = len(tokens[order[-1]]) if order else 0
    for sample in order:
        need = len(tokens[sample])
        while first < len(bins) and room[first] < shortest:
            first += 1
        spot = next((n for n in range(first, len(bins)) if room[n] >= need), None)
        if spot is None:
            bins.append([])
            room.append(length)
            spot = len(bins) - 1
        bins[spot].append(sample)
        room[spot] -= need
    rows = rows_for(length, batch_tokens, multiple)
    for at in range(0, len(bins), rows):
        yield _pack(tokens, bins[at : at + rows], rows, length)


def _pack(tokens: Sequence[np.ndarray], bins: list[list[int]], rows: int, length: int) -> Batch:
    batch, positions = (np.zeros((rows, length), np.int32) for _ in range(2))
    segments = np.full((rows, length), PADDING_SEGMENT, np.int32)
    places = []
    for row, members in enumerate(bins):
        start = 0
        for number, sample in enumerate(members):
            size = len(tokens[sample])
            span = slice(start, start + size)
            batch[row, span] = tokens[sample]
            positions[row, span] = np.arange(size)
            segments[row, span] = number
            places.append(SampleSpan(sample=sample, row=row, start=start, length=size))
            start += size
    return Batch(tokens=batch, positions=positions, segments=segments, spans=tuple(places))
