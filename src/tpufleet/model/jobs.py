"""Jobs: what somebody asked to have run to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NewType

from tpufleet.model.end_reasons import Budget, EndReason

JobId = NewType("JobId", str)


class JobState(StrEnum):
    QUEUED = "queued"  # behind others, over a limit, or backing off
    WAITING = "waiting"  # capacity is asked for, and not there yet
    STARTING = "starting"  # hosts run setup
    RUNNING = "running"  # every host runs the command
    RECOVERING = "recovering"  # an attempt ended; the next is on its way
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})


class Capacity(StrEnum):
    SPOT = "spot"
    ON_DEMAND = "on-demand"
    RESERVED = "reserved"
    QUEUED = "queued"


class Rule(StrEnum):
    """What follows preempted, connection lost and device busy. `policy.rules` has the table."""

    PRE = "pre"
    PASS = "pass"
    REAPPLY = "reapply"
    RERUN = "rerun"
    RESUME = "resume"


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How often each kind of failure is tried again. Preemptions are free and not counted."""

    failure: int = 0
    setup: int = 2
    memory: int = 1
    hang: int = 2
    infrastructure: int = 20

    def limit(self, budget: Budget) -> int:
        return int(getattr(self, budget.value))


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """What the job file says. Never changed after submit."""

    name: str
    command: tuple[str, ...]  # argv; no shell unless the user names one
    accelerator: str  # canonical: v5litepod-16
    setup: tuple[str, ...] = ()
    slices: int = 1
    capacity: tuple[Capacity, ...] = (Capacity.SPOT,)
    zones: tuple[str, ...] = ()  # in order of preference; empty: the provider's default
    providers: tuple[str, ...] = ()  # in order of preference; empty: the server's default
    pool: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)  # environment name → reference
    workdir: str = "."
    checkpoint: str | None = None  # location; empty: a folder that the server chooses
    timeout: timedelta | None = None  # of time spent running, all attempts together
    priority: int = 0  # larger goes first
    rule: Rule = Rule.PRE
    retries: Retries = field(default_factory=Retries)
    crash_loop: int = 3  # stop after this many charged attempts without a newer checkpoint
    grace: timedelta = timedelta(seconds=30)  # between SIGTERM and SIGKILL
    hung_after: timedelta | None = timedelta(minutes=30)
    tags: tuple[str, ...] = ()
    notes: str = ""

    @property
    def labels(self) -> dict[str, str]:
        """Tags written as name=value, for places that show labels."""
        parted = (tag.partition("=") for tag in self.tags)
        return {name: value for name, equals, value in parted if name and equals}


class ParentRelation(StrEnum):
    """How a job came from its parent."""

    RESUME = "resume"
    RERUN = "rerun"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    id: JobId
    spec: JobSpec
    owner: str
    submitted_at: datetime
    state: JobState = JobState.QUEUED
    reason: str = "submitted"  # why it is in this state, in words
    snapshot: str | None = None  # digest of the code it runs
    checkpoint: str = ""  # where its checkpoints live; a resumed job shares its parent's
    parent: JobId | None = None
    parent_relation: ParentRelation | None = None
    cancel_requested_by: str | None = None
    not_before: datetime | None = None  # backing off until then
    fresh_from: int = 0  # attempts before this one left no checkpoint worth loading (rule `rerun`)
    ended_at: datetime | None = None
    end_reason: EndReason | None = None
    advice: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ENDED_STATES
