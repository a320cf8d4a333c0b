"""Events: something that happened to a job, attempt, slice or pool, with the reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.job.jobs import JobId


class EventKind(StrEnum):
    JOB = "job"  # the job changed state
    ATTEMPT = "attempt"
    SLICE = "slice"
    POOL = "pool"
    BUDGET = "budget"  # of a user or a pool


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    at: datetime
    kind: EventKind
    state: str  # the new state: "running", "preempted", …
    message: str  # one sentence for people
    job_id: JobId | None = None
    attempt_id: AttemptId | None = None
    slice_id: SliceId | None = None
    host_id: HostId | None = None
    pool: str | None = None
    by: str | None = None  # the user, if any
    data: dict[str, str] = field(default_factory=dict)
    seq: int = 0  # assigned by the store; increasing

    @property
    def reservation(self) -> str | None:
        """Id of the reservation that it is about."""
        return self.data.get("reservation")
