"""Samples before and after tokenization, and the interface of sample sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

DEFAULT_SPLIT = "train"  # of a dataset with several


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One input to the model: a text, a conversation, or token ids."""

    index: int
    id: str
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas, for the chat template
    answer: str | None = None  # start of the assistant's turn; the rendered prompt ends after it
    tokens: Sequence[int] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    skip_reason: str = ""  # why it cannot be used; such a sample is stored without tokens


Runs = tuple[tuple[int, int], ...]  # [start, stop) of tokens, in order


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedSample:
    """The tokens of a sample. A skipped one has none; `metadata` has the reason."""

    index: int
    tokens: np.ndarray
    metadata: Mapping[str, Any]
    stored: Runs | None = None  # the tokens whose activations are stored; None: all

    @property
    def runs(self) -> Runs:
        return ((0, len(self.tokens)),) if self.stored is None else self.stored


class SampleSource(Protocol):
    """An indexed collection of samples. An index always refers to the same sample."""

    def count(self) -> int: ...

    def read(self, span: range) -> list[Sample]: ...

    def digest(self) -> str:
        """Changes when any sample does."""
