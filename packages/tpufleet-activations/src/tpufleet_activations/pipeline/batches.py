"""Batching of samples of any length: few distinct shapes, little padding, deterministic order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from tpufleet_activations.input_errors import check_choice
from tpufleet_activations.model.batch import Batch, SampleSpan, most_samples

BUCKETS = (64, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
LENGTH_STEP = 64  # lengths are multiples of it
# Lognormal lengths (median 266, sigma 1.2, at most 2,048) are padded by 9 % with 16, 13 % with 10.
MOST_BUCKETS = 16
# Batches above this size are not faster on any chip that was measured.
LARGEST_BATCH, SMALLEST_BATCH = 32768, 2048
INCOMPLETE_SHARE = 0.03
TOKEN_TILE = 256  # tokens per tile of the device kernels
PADDING_SEGMENT = -1  # segment id of padding positions
BATCHINGS = ("auto", "bucket", "pack")
RESOLVED = ("bucket", "pack", "varlen")  # by `resolve_batching`


def buckets_up_to(max_length: int) -> tuple[int, ...]:
    """The lengths that rows are padded to; beyond the table, in steps of 1,024."""
    table = [*BUCKETS, *range(3072, max_length + 1024, 1024)]
    return (*(size for size in table if size < max_length), max_length)


def choose_buckets(
    lengths: Sequence[int], max_length: int, most: int = MOST_BUCKETS
) -> tuple[int, ...]:
    """At most `most` lengths with the least padding for samples of these lengths; the last is
    `max_length`. Each length that occurs is one program to compile.

    They are multiples of LENGTH_STEP, which the kernels for attention and the MLP need.
    """
    ends = [*range(LENGTH_STEP, max_length, LENGTH_STEP), max_length]
    counts = np.zeros(len(ends))
    for length in lengths:
        if length > 0:
            counts[min((length - 1) // LENGTH_STEP, len(ends) - 1)] += 1
    below = np.concatenate([[0.0], np.cumsum(counts)])
    # cost[n]: computed tokens of the samples in the first n steps, with `used` buckets.
    cost = np.array([0.0, *np.where(below[1:] > 0, np.inf, 0.0)])
    choices: list[np.ndarray] = []
    for _ in range(min(most, len(ends))):
        # [n, m]: a bucket of length ends[n - 1] for the samples in steps m to n.
        samples = below[:, None] - below[None, :]
        padded = np.array([0, *ends])[:, None] * samples + cost[None, :]
        padded[np.triu_indices(len(padded), 1)] = np.inf
        choices.append(padded.argmin(axis=1))
        cost = padded.min(axis=1)
    buckets, at = {max_length}, len(ends)
    for choice in reversed(choices):
        previous = int(choice[at])
        if at and below[at] > below[previous]:
            buckets.add(ends[at - 1])
        at = previous
    return tuple(sorted(buckets))


def choose_batch_tokens(tokens: float, buckets: int) -> int:
    """Tokens of a batch for a dataset of this size. The last batch of each length is incomplete,
    so batches are smaller where those would be more than a few percent of the work."""
    size = LARGEST_BATCH
    while size > SMALLEST_BATCH and size * buckets / 2 > INCOMPLETE_SHARE * tokens:
        size //= 2
    return size


def rows_for(length: int, batch_tokens: int, row_multiple: int) -> int:
    """Rows of a batch of this length: one shape per length, divisible by `row_multiple`, and where
    possible with a number of tokens divisible by TOKEN_TILE."""
    rows = max(batch_tokens // length // row_multiple, 1) * row_multiple
    step = row_multiple * (TOKEN_TILE // math.gcd(length, TOKEN_TILE))
    return rows // step * step or rows


def resolve_batching(batching: str, buckets: Sequence[int], *, varlen: bool) -> str:
    """How to batch what is planned as `batching` (BATCHINGS) on these devices. `varlen`: their
    attention takes packed rows at no more than the cost of the samples."""
    check_choice("batching", batching, BATCHINGS)
    # Samples of one length, and a few longer ones: packing would gain nothing.
    few = batching == "auto" and len(buckets) <= 2
    if varlen and batching != "bucket" and not few:
        return "varlen"
    return "bucket" if batching == "auto" else batching


def make_batches(
    tokens: Sequence[np.ndarray],
    *,
    batching: str,
    buckets: Sequence[int],
    batch_tokens: int,
    row_multiple: int = 1,
    fill: bool = False,
    units: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Batches with every sample that has tokens exactly once, longest first.

    `fill` completes the last batch of each length with shorter samples: less padding where few
    samples are batched together, but the shape that a sample is computed in depends on the others.

    `batching` is "bucket" (rows of similar samples, padded), "pack" (rows of the greatest length,
    each filled with the samples that fit best) or "varlen" (one long row per device, filled in
    order: a single shape and hardly any padding, if attention does not pay for the row's length).

    `units` are those of the samples. Samples of one length come from all units in turn, so that
    their files are written at the same time: one thread at a time can write to a file. In a batch a
    unit's samples are adjacent, so that they are written as one piece of memory.

    The order of a unit's samples does not depend on the batch size or the number of devices.
    """
    check_choice("batching", batching, RESOLVED)
    within = _numbers_within(units) if units is not None else range(len(tokens))
    order = sorted(
        (n for n in range(len(tokens)) if len(tokens[n])),
        key=lambda n: (-len(tokens[n]), within[n], n),
    )
    assert not order or len(tokens[order[0]]) <= buckets[-1], "contexts fit the largest bucket"
    batcher = _Batcher(tokens, order, buckets, batch_tokens, row_multiple, units)
    if batching == "bucket":
        yield from batcher.filled() if fill else batcher.bucketed()
    else:
        yield from batcher.packed() if batching == "pack" else batcher.varlen()


def _numbers_within(units: Sequence[int]) -> list[int]:
    """The number of each sample within its unit."""
    seen: Counter[int] = Counter()
    numbers = []
    for unit in units:
        numbers.append(seen[unit])
        seen[unit] += 1
    return numbers


@dataclass(frozen=True, slots=True)
class _Batcher:
    """`order` are the samples with tokens, longest first; the rest as of `make_batches`."""

    tokens: Sequence[np.ndarray]
    order: list[int]
    buckets: Sequence[int]
    batch_tokens: int
    multiple: int
    units: Sequence[int] | None

    def bucketed(self) -> Iterator[Batch]:
        """Every sample is in a batch of the smallest length that holds it, so the shape it is
        computed in, and with it every bit of the result, does not depend on those beside it."""
        lengths = np.searchsorted(self.buckets, [len(self.tokens[sample]) for sample in self.order])
        pairs = zip(lengths, self.order, strict=True)
        for bucket, group in groupby(pairs, key=lambda pair: pair[0]):
            length = int(self.buckets[bucket])
            rows = rows_for(length, self.batch_tokens, self.multiple)
            members = [sample for _, sample in group]
            for at in range(0, len(members), rows):
                yield self._padded(members[at : at + rows], rows, length)

    def filled(self) -> Iterator[Batch]:
        at = 0
        while at < len(self.order):
            longest = len(self.tokens[self.order[at]])
            length = next(size for size in self.buckets if size >= longest)
            rows = rows_for(length, self.batch_tokens, self.multiple)
            yield self._padded(self.order[at : at + rows], rows, length)
            at += rows

    def packed(self) -> Iterator[Batch]:
        bins: list[list[int]] = []
        room: list[int] = []
        first = 0  # earlier bins have no room for the shortest sample
        length = self.buckets[-1]
        shortest = len(self.tokens[self.order[-1]]) if self.order else 0
        for sample in self.order:
            need = len(self.tokens[sample])
            while first < len(bins) and room[first] < shortest:
                first += 1
            target = next((n for n in range(first, len(bins)) if room[n] >= need), None)
            if target is None:
                bins.append([])
                room.append(length)
                target = len(bins) - 1
            bins[target].append(sample)
            room[target] -= need
        rows = rows_for(length, self.batch_tokens, self.multiple)
        for at in range(0, len(bins), rows):
            yield _pack(self.tokens, bins[at : at + rows], rows, length)

    def varlen(self) -> Iterator[Batch]:
        """Rows filled in order, so that a unit's samples come in the same order whatever other
        units share its batches."""
        length = _varlen_length(self.buckets[-1], self.batch_tokens, self.multiple)
        bins: list[list[int]] = []
        room = 0
        for sample in self.order:
            if room < len(self.tokens[sample]) or len(bins[-1]) == most_samples(length) - 1:
                bins.append([])
                room = length
            bins[-1].append(sample)
            room -= len(self.tokens[sample])
        bins = [self._adjacent(members) for members in bins]
        for at in range(0, len(bins), self.multiple):
            yield _pack(self.tokens, bins[at : at + self.multiple], self.multiple, length)

    def _adjacent(self, members: list[int]) -> list[int]:
        return members if self.units is None else sorted(members, key=self.units.__getitem__)

    def _padded(self, members: list[int], rows: int, length: int) -> Batch:
        batch = np.zeros((rows, length), np.int32)
        spans = []
        for row, sample in enumerate(self._adjacent(members)):
            size = len(self.tokens[sample])
            batch[row, :size] = self.tokens[sample]
            spans.append(SampleSpan(sample=sample, row=row, start=0, length=size))
        # Padding follows the tokens of a row, so causal attention never sees it.
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), batch.shape)
        return Batch(tokens=batch, positions=positions, segments=None, spans=tuple(spans))


def empty_varlen(buckets: Sequence[int], batch_tokens: int, row_multiple: int) -> Batch:
    """A batch without samples, of the one shape that `varlen` batches have: to compile it."""
    length = _varlen_length(buckets[-1], batch_tokens, row_multiple)
    return _pack([], [[]] * row_multiple, row_multiple, length)


def _varlen_length(longest: int, batch_tokens: int, multiple: int) -> int:
    return -(-max(batch_tokens // multiple, longest) // TOKEN_TILE) * TOKEN_TILE


def _pack(tokens: Sequence[np.ndarray], bins: list[list[int]], rows: int, length: int) -> Batch:
    batch = np.zeros((rows, length), np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32) % TOKEN_TILE, (rows, 1))
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
        # Padding looks like short samples, so that attention spends little on it.
        positions[row, start:] = np.arange(length - start) % TOKEN_TILE
    return Batch(tokens=batch, positions=positions, segments=segments, spans=tuple(spans))
