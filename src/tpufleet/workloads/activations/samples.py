"""Samples before they are tokens, and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One input to the model: a text, a conversation, or tokens as they are."""

    index: int
    id: str
    text: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    answer: str | None = None  # the conversation's last words; what the template adds is cut off
    tokens: Sequence[int] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    skip_reason: str = ""  # why it cannot be used; such a sample is kept with no tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedSample:
    """A sample as the model sees it. Skipped ones have no tokens, and `about` says why."""

    index: int
    tokens: np.ndarray
    metadata: Mapping[str, Any]


class SampleSource(Protocol):
    """A numbered collection of samples. The same number is always the same sample."""

    def count(self) -> int: ...

    def read(self, span: range) -> list[Sample]: ...

    def digest(self) -> str:
        """Changes when any sample does."""
