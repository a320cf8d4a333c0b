"""What placement works on, and what it can decide: who needs what, what there is, and what
follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from tpufleet.model.jobs import Job, JobId
from tpufleet.model.pools import Pool
from tpufleet.model.slices import SliceId
from tpufleet.policy.capacity import CapacitySource


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingJob:
    """A job that lacks slices."""

    job: Job
    missing: int
    sources: tuple[CapacitySource, ...]  # where it may run, best first; unused for a job in a pool
    held_source: CapacitySource | None = None  # where it already holds part of its gang
    rank: tuple[int, datetime, JobId] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rank = (-self.job.spec.priority, self.job.submitted_at, self.job.id)
        object.__setattr__(self, "rank", rank)  # worked out once: queues are sorted often


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupant:
    """A job that holds slices of a pool."""

    job_id: JobId
    priority: int
    since: datetime
    slices: int
    ends_by: datetime | None = None  # known when it has a time limit
    stopping: bool = False  # told to stop; its slices come back


class FreeSlice(NamedTuple):
    """A slice of a pool that is ready and held by nobody."""

    id: SliceId
    zone: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Supply:
    """What there is to place on."""

    pools: Mapping[str, Pool] = field(default_factory=dict)
    free: Mapping[str, Sequence[FreeSlice]] = field(default_factory=dict)  # by pool
    live: Mapping[str, int] = field(default_factory=dict)  # slices of each pool
    occupants: Mapping[str, Sequence[Occupant]] = field(default_factory=dict)
    held: Mapping[tuple[str | None, str], int] = field(default_factory=dict)  # by pool and owner
    pending_requests: Mapping[CapacitySource, int] = field(default_factory=dict)
    pool_sources: Mapping[str, tuple[CapacitySource, ...]] = field(default_factory=dict)
    slices_per_user: int | None = None  # over everything


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignSlices:
    """Give these free slices of a pool to the job."""

    job_id: JobId
    slices: tuple[SliceId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSlices:
    """Ask a provider for this many slices, together."""

    source: CapacitySource
    accelerator: str
    count: int
    job_id: JobId | None = None
    pool: str | None = None


class Wait(NamedTuple):
    """Nothing for it now. A tuple, for a long queue makes one for every job in every plan."""

    job_id: JobId
    reason: str
    until: datetime | None = None
    unsatisfiable: bool = False  # waiting will not help


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseGang:
    """Part of a gang is held where the rest cannot be had: let go of it, and look elsewhere."""

    job_id: JobId
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Supersede:
    """Stop this job: one of higher priority needs its slices."""

    job_id: JobId
    for_job: JobId


PlacementDecision = AssignSlices | RequestSlices | Wait | ReleaseGang | Supersede
