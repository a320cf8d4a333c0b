"""Events: something that happened to a job, attempt, slice or host, with the reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from tpufleet.model.attempts import AttemptId
from tpufleet.model.hosts import HostId
from tpufleet.model.jobs import JobId
from tpufleet.model.slices import SliceId


class EventKind(StrEnum):
    JOB = "job"  # the job changed state
    ATTEMPT = "attempt"
    SLICE = "slice"
    HOST = "host"
    POOL = "pool"
    CONTROLLER = "controller"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    at: datetime
    kind: EventKind
    state: str  # the state it came to: "running", "preempted", …
    message: str  # one sentence for people
    job_id: JobId | None = None
    attempt_id: AttemptId | None = None
    slice_id: SliceId | None = None
    host_id: HostId | None = None
    pool: str | None = None
    by: str | None = None  # the person, where there was one
    data: dict[str, str] = field(default_factory=dict)
    seq: int = 0  # given by the store; grows
