"""The controller's inbox: user commands and host reports, in order of arrival."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from tpufleet.model.fleet.agent_protocol import Heartbeat
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import JobId


class InboxMessageKind(StrEnum):
    SUBMITTED = "submitted"  # a job was inserted
    CANCEL = "cancel"
    EDITED = "edited"  # name, tags, notes, priority or place in the queue
    RETRY = "retry"  # request capacity for a job now, without waiting for the backoff
    HEARTBEAT = "heartbeat"  # one that reports a change
    RESERVED = "reserved"  # a reservation was made, changed or ended
    HELD_SLICE_RELEASED = "held_slice_released"  # by its owner
    POOL_CHANGED = "pool_changed"
    ADOPT = "adopt"  # make a node that a person made a slice of a pool
    UNREGISTER = "unregister"  # give an adopted node back
    FAULT = "fault"  # inject a fault into a slice


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
    node: str = ""  # to adopt
    zone: str = ""  # of that node
    seq: int = 0  # assigned by the store; increasing
