"""Batching of samples of any length: few distinct shapes, little padding, deterministic order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tpufleet.errors import BadInput

BUCKETS = (64, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
TOKEN_TILE = 256  # tokens per tile of the device kernels
PADDING_SEGMENT = -1  # segment id of padding positions


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSpan:
    """The position of a sample in a batch."""

    sample: int  # index within the unit
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
        return sum(span.length for span in self.spans)


def buckets_up_to(max_length: int) -> tuple[int, ...]:
    """The lengths that rows are padded to; beyond the table, in steps of 1,024."""
    table = [*BUCKETS, *range(3072, max_length + 1024, 1024)]
    return (*(size for size in table if size < max_length), max_length)


def rows_for(length: int, batch_tokens: int, row_multiple: int) -> int:
    """Rows of a batch of this length: one shape per length, divisible by `row_multiple`, and where
    possible with a number of tokens divisible by TOKEN_TILE."""
    rows = max(batch_tokens // length // row_multiple, 1) * row_multiple
    step = row_multiple * (TOKEN_TILE // math.gcd(length, TOKEN_TILE))
    return rows // step * step or rows


def make_batches(
    tokens: Sequence[np.ndarray],
    *,
    batching: str,
    buckets: Sequence[int],
    batch_tokens: int,
    row_multiple: int = 1,
) -> Iterator[Batch]:
    """Batches with every sample that has tokens exactly once, longest first.

    The order of samples does not depend on the batch size or the number of devices.
    """
    order = sorted(
        (n for n in range(len(tokens)) if len(tokens[n])), key=lambda n: (-len(tokens[n]), n)
    )
    if order and len(tokens[order[0]]) > buckets[-1]:
        raise BadInput(
            f"a sample of {len(tokens[order[0]])} tokens exceeds the largest bucket, {buckets[-1]}"
        )
    if batching == "pack":
        yield from _packed(tokens, order, buckets[-1], batch_tokens, row_multiple)
    elif batching == "bucket":
        yield from _bucketed(tokens, order, buckets, batch_tokens, row_multiple)
    else:
        raise BadInput(f"batching {batching!r} is not one of bucket, pack")


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
        spans = []
        for row, sample in enumerate(chosen):
            batch[row, : len(tokens[sample])] = tokens[sample]
            spans.append(SampleSpan(sample=sample, row=row, start=0, length=len(tokens[sample])))
        # Padding follows the tokens of a row, so causal attention never sees it.
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), batch.shape)
        yield Batch(tokens=batch, positions=positions, segments=None, spans=tuple(spans))


def _packed(
    tokens: Sequence[np.ndarray], order: list[int], length: int, batch_tokens: int, multiple: int
) -> Iterator[Batch]:
    bins: list[list[int]] = []
    room: list[int] = []
    first = 0  # earlier bins have no room for the shortest sample
    shortest = len(tokens[order[-1]]) if order else 0
    for sample in order:
        need = len(tokens[sample])
        while first < len(bins) and room[first] < shortest:
            first += 1
        target = next((n for n in range(first, len(bins)) if room[n] >= need), None)
        if target is None:
            bins.append([])
            room.append(length)
            target = len(bins) - 1
        bins[target].append(sample)
        room[target] -= need
    rows = rows_for(length, batch_tokens, multiple)
    for at in range(0, len(bins), rows):
        yield _pack(tokens, bins[at : at + rows], rows, length)


def _pack(tokens: Sequence[np.ndarray], bins: list[list[int]], rows: int, length: int) -> Batch:
    batch, positions = (np.zeros((rows, length), np.int32) for _ in range(2))
    segments = np.full((rows, length), PADDING_SEGMENT, np.int32)
    spans = []
    for row, members in enumerate(bins):
        start = 0
        for number, sample in enumerate(members):
            size = len(tokens[sample])
            span = slice(start, start + size)
            batch[row, span] = tokens[sample]
            positions[row, span] = np.arange(size)
            segments[row, span] = number
            spans.append(SampleSpan(sample=sample, row=row, start=start, length=size))
            start += size
    return Batch(tokens=batch, positions=positions, segments=segments, spans=tuple(spans))
