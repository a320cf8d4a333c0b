"""What the agent's loop hears of: other threads put it into its inbox."""

from __future__ import annotations

from dataclasses import dataclass

from tpufleet.model.hosts import NoticeKind
from tpufleet.model.wire import Heartbeat, HeartbeatReply


@dataclass(frozen=True, slots=True)
class HeartbeatAnswered:
    number: int
    beat: Heartbeat
    sent_at: float
    reply: HeartbeatReply


@dataclass(frozen=True, slots=True)
class HeartbeatFailed:
    number: int
    error: Exception


@dataclass(frozen=True, slots=True)
class NoticeReceived:
    kind: NoticeKind


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """A workload entered another phase."""


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    pass


InboxMessage = HeartbeatAnswered | HeartbeatFailed | NoticeReceived | PhaseChanged | ShutdownRequested
