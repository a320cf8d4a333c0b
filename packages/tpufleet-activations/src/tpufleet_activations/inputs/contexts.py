"""Which tokens of a sample are stored, and the contexts that a long sample is divided into."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from tpufleet_activations.inputs.samples import Runs, TokenizedSample

# all: every token. no-special: none that the tokenizer calls special, such as BOS and the markers
# of a chat template. answer: the content of a conversation's last answer. last: the last token.
KEEP = ("all", "no-special", "answer", "last")


@dataclass(frozen=True)
class Context:
    """Tokens start … stop of a sample, which the model sees together, from position 0 on."""

    sample: TokenizedSample
    start: int
    stop: int
    runs: Runs  # of those, the tokens that are stored, counted from `start`
    number: int = 0  # among the contexts of the sample
    count: int = 1

    @property
    def tokens(self) -> np.ndarray:
        return self.sample.tokens[self.start : self.stop]

    @cached_property
    def stored_positions(self) -> np.ndarray:
        """Positions within the sample."""
        none = np.empty(0, np.int32)
        runs = [np.arange(start, stop, dtype=np.int32) for start, stop in self.runs]
        return np.concatenate([none, *runs]) + np.int32(self.start)

    @property
    def stored(self) -> tuple[Context, ...]:
        return (self,)

    @property
    def metadata(self) -> dict[str, Any]:
        metadata = dict(self.sample.metadata)
        if self.count > 1:
            metadata |= {"context": self.number, "contexts": self.count}
        return metadata


@dataclass(frozen=True)
class JoinedContext:
    """Parts of consecutive samples, which the model sees as one text. One that begins within a
    sample has the sample's BOS before it, which is not stored again."""

    parts: tuple[Context, ...]
    bos: bool

    @cached_property
    def tokens(self) -> np.ndarray:
        first = self.parts[0].sample.tokens[: int(self.bos)]
        return np.concatenate([first, *(part.tokens for part in self.parts)])

    @property
    def runs(self) -> Runs:
        runs, at = [], int(self.bos)
        for part in self.parts:
            runs += [(at + start, at + stop) for start, stop in part.runs]
            at += len(part.tokens)
        return tuple(runs)

    @property
    def stored(self) -> tuple[Context, ...]:
        return tuple(part for part in self.parts if part.runs)


AnyContext = Context | JoinedContext


def divide(
    samples: Sequence[TokenizedSample], *, max_length: int, too_long: str, stride: int
) -> list[AnyContext]:
    """The contexts of a unit's samples."""
    if too_long == "concat":
        return join(samples, max_length)
    return [one for sample in samples for one in split(sample, max_length, stride or max_length)]


def join(samples: Sequence[TokenizedSample], max_length: int) -> list[AnyContext]:
    """One text after the other, cut into contexts of `max_length` tokens; the last one is shorter.
    Contexts without a stored token are left out."""
    made = [one for one in _joined(samples, max_length) if one.stored]
    counts = Counter(part.sample.index for one in made for part in one.stored)
    numbers: Counter[int] = Counter()
    contexts: list[AnyContext] = []
    for one in made:
        parts = []
        for part in one.parts:
            index = part.sample.index
            parts.append(replace(part, number=numbers[index], count=counts[index]))
            numbers[index] += bool(part.runs)
        contexts.append(replace(one, parts=tuple(parts)))
    skipped = [Context(one, 0, 0, one.runs) for one in samples if not len(one.tokens)]
    return contexts + skipped


def _joined(samples: Sequence[TokenizedSample], max_length: int) -> Iterator[JoinedContext]:
    parts: list[Context] = []
    room, bos = max_length, False
    for sample in samples:
        at, size = 0, len(sample.tokens)
        while at < size:
            if not parts:
                bos = at > 0 and max_length > 1
                room = max_length - bos
            stop = min(size, at + room)
            parts.append(Context(sample, at, stop, _clip(sample.runs, at, stop, at)))
            room, at = room - (stop - at), stop
            if not room:
                yield JoinedContext(tuple(parts), bos)
                parts = []
    if parts:
        yield JoinedContext(tuple(parts), bos)


def split(sample: TokenizedSample, max_length: int, stride: int) -> list[Context]:
    """The contexts of a sample: one, unless it is longer than `max_length`.

    Contexts begin every `stride` tokens. Where two overlap, the later one stores the tokens that
    the earlier one lacks, so that each token is stored once, with at least `max_length - stride`
    tokens before it, or all that there are. Contexts without a stored token are left out.
    """
    size = len(sample.tokens)
    if size <= max_length:
        return [Context(sample, 0, size, sample.runs)]
    bounds = []
    done = 0  # tokens that earlier contexts store
    for start in range(0, size, stride):
        stop = min(start + max_length, size)
        runs = _clip(sample.runs, done, stop, start)
        if runs:
            bounds.append((start, stop, runs))
        done = stop
        if stop == size:
            break
    return [
        Context(sample, start, stop, runs, number, len(bounds))
        for number, (start, stop, runs) in enumerate(bounds)
    ]


def _clip(runs: Runs, low: int, high: int, origin: int) -> Runs:
    """The parts of `runs` within low … high, counted from `origin`."""
    clipped = ((max(start, low), min(stop, high)) for start, stop in runs)
    return tuple((start - origin, stop - origin) for start, stop in clipped if start < stop)


def runs_of(mask: np.ndarray) -> Runs:
    """The runs of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
