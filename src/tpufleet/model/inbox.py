"""The controller's inbox: commands from people and news from hosts, in order of arrival."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from tpufleet.model.agent_protocol import Heartbeat
from tpufleet.model.jobs import JobId
from tpufleet.model.slices import SliceId


class InboxMessageKind(StrEnum):
    SUBMITTED = "submitted"  # a job was inserted
    CANCEL = "cancel"
    HEARTBEAT = "beat"  # a heartbeat that carries news
    POOL_CHANGED = "pool_changed"
    FAULT = "fault"  # ask the provider to hurt a slice (drills and tests)


@dataclass(frozen=True, kw_only=True, slots=True)
class InboxMessage:
    kind: InboxMessageKind
    at: datetime
    by: str | None = None
    job_id: JobId | None = None
    slice_id: SliceId | None = None
    pool: str | None = None
    heartbeat: Heartbeat | None = None
    fault: str | None = None  # a `providers.base.Fault`
    host_index: int | None = None
    seq: int = 0  # given by the store; grows
