"""Which tokens of a sample are stored, and the contexts that a long sample is divided into."""

from __future__ import annotations

from dataclasses import dataclass
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
    def metadata(self) -> dict[str, Any]:
        metadata = dict(self.sample.metadata)
        if self.count > 1:
            metadata |= {"context": self.number, "contexts": self.count}
        return metadata


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
