"""What the agent's loop hears of: other threads put it into its inbox."""

from __future__ import annotations

from dataclasses import dataclass

from tpufleet.model.hosts import NoticeKind
from tpufleet.model.wire import Beat, BeatReply


@dataclass(frozen=True, slots=True)
class Answered:
    number: int
    beat: Beat
    sent_at: float
    reply: BeatReply


@dataclass(frozen=True, slots=True)
class Unanswered:
    number: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Noticed:
    kind: NoticeKind


@dataclass(frozen=True, slots=True)
class Changed:
    """A workload entered another phase."""


@dataclass(frozen=True, slots=True)
class ToldToLeave:
    pass


News = Answered | Unanswered | Noticed | Changed | ToldToLeave
