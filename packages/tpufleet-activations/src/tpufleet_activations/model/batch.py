"""What the model computes at a time: rows of tokens, each with one sample or several."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Attention of packed rows has a table of fixed size: at most a sample for each so many tokens.
SHORTEST_MEAN = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSpan:
    """The position of a sample in a batch."""

    sample: int  # index among the samples that are batched together
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


def most_samples(length: int) -> int:
    """The samples that a packed row may hold, its padding counted as one."""
    return max(length // SHORTEST_MEAN, 2)
