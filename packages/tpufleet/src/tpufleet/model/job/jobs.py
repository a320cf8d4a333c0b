"""Jobs: what a user asked to be run to completion."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NewType

from tpufleet.model.job.end_reasons import EndReason, RetryBudget
from tpufleet.model.job.mounts import Mount
from tpufleet.model.job.pod_settings import PodSettings

JobId = NewType("JobId", str)


class JobState(StrEnum):
    QUEUED = "queued"  # behind others, over a limit, or backing off
    WAITING = "waiting"  # the provider has accepted slices; not all are ready yet
    STARTING = "starting"  # hosts run setup
    RUNNING = "running"  # every host runs the command
    RECOVERING = "recovering"  # an attempt ended; the next will follow
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
    """The reaction to a preemption, a lost connection and a busy device. The table is in
    `policy.retry_rules`."""

    AUTO = "auto"  # the default: retry whatever the program is not to blame for
    PRE = "pre"
    PASS = "pass"
    REAPPLY = "reapply"
    RERUN = "rerun"
    RESUME = "resume"


# Whoever may talk to Docker on the server's machine has root there.
IMAGES_REFUSED = (
    "jobs on `local` run on the server's own machine and may not use its Docker; remove image, use "
    "another provider, or let an admin set `local_containers: true` in the config file"
)
TPU_VM_IMAGES_REFUSED = (
    "jobs on TPU VMs of this server may not use Docker, which would make them root on their hosts; "
    "remove image, or let an admin set `containers: true` in `tpu_vm` of the config file"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """Maximum retries for each kind of failure. Preemptions are not counted."""

    failure: int = 0
    setup: int = 2
    memory: int = 1
    hang: int = 2
    infrastructure: int = 20

    def limit(self, budget: RetryBudget) -> int:
        return int(getattr(self, budget.value))


class UsedSlice(StrEnum):
    """A free slice of a pool, by the job that used it last. One that no job used is always free."""

    OWN_FINISHED = "own-finished"  # also cancelled
    OTHERS_FINISHED = "others-finished"
    OWN_FAILED = "own-failed"
    OTHERS_FAILED = "others-failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """The content of a job file. Immutable after submit."""

    name: str
    command: tuple[str, ...]  # argv; no shell unless the user names one
    accelerator: str  # canonical: v5litepod-16
    setup: tuple[str, ...] = ()
    python: str | None = None  # version; None: the host's default
    dependencies: tuple[str, ...] | None = None  # None: those declared in the working directory
    image: str | None = None  # container image instead of an environment
    slices: int = 1
    capacity: tuple[Capacity, ...] = (Capacity.SPOT,)
    zones: tuple[str, ...] = ()  # in order of preference; empty: the provider's default
    providers: tuple[str, ...] = ()  # in order of preference; empty: the server's default
    pool: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)  # environment name → reference
    workdir: str = "."
    checkpoint: str | None = None  # location; None: chosen by the server
    timeout: timedelta | None = None  # of running time, summed over all attempts
    priority: int = 0  # larger goes first
    rule: Rule = Rule.AUTO
    retries: Retries = field(default_factory=Retries)
    crash_loop: int = 3  # stop after this many charged attempts without a newer checkpoint
    grace: timedelta = timedelta(seconds=30)  # between SIGTERM and SIGKILL
    hung_after: timedelta | None = timedelta(minutes=30)
    tags: tuple[str, ...] = ()
    notes: str = ""
    metrics: dict[str, str] = field(default_factory=dict)  # name → regular expression
    max_cost: float | None = None  # in dollars, over all attempts
    mounts: tuple[Mount, ...] = ()
    max_hours: float | None = None  # billed, per slice, over all attempts
    pod: PodSettings = field(default_factory=PodSettings)  # on Kubernetes only
    reuse: tuple[UsedSlice, ...] = ()  # of a pool; empty: any
    require_reservation: bool = False  # wait until its owner has reserved the pool
    notify: tuple[str, ...] = ()  # channels of the owner; empty: as each of them says

    @property
    def labels(self) -> dict[str, str]:
        """Tags of the form name=value."""
        parts = (tag.partition("=") for tag in self.tags)
        return {name: value for name, equals, value in parts if name and equals}


ID_LETTERS, ID_LENGTH = "abcdefghijklmnopqrstuvwxyz234567", 12  # of the ids that clients generate
_GENERATED_ID = re.compile(f"(?:fs-)?(?:[{ID_LETTERS}]{{{ID_LENGTH}}}){{1,2}}")  # fs-: Firestore


def is_generated_id(text: str) -> bool:
    """By a client, at random; else a user chose it, and it may also be the name of a job."""
    return _GENERATED_ID.fullmatch(text) is not None and not text.isalpha()


def default_name(base: str, job_id: JobId) -> str:
    """A unique name for a job whose user chose none: `train-k3f9`."""
    return f"{base[:35]}-{job_id[:4]}"


class ParentRelation(StrEnum):
    """How a job was derived from its parent."""

    RESUME = "resume"
    RERUN = "rerun"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    id: JobId
    spec: JobSpec
    owner: str
    submitted_at: datetime
    state: JobState = JobState.QUEUED
    reason: str = "submitted"  # why it is in this state
    snapshot: str | None = None  # digest of the code it runs
    checkpoint: str = ""  # where its checkpoints live; a resumed job shares its parent's
    parent: JobId | None = None
    parent_relation: ParentRelation | None = None
    cancel_requested_by: str | None = None
    not_before: datetime | None = None  # backoff before the next attempt
    fresh_from: int = 0  # checkpoints of earlier attempts are not loaded (rule `rerun`)
    ended_at: datetime | None = None
    end_reason: EndReason | None = None
    advice: str = ""
    held_by: str | None = None  # a user who keeps it from being placed
    queued_at: datetime | None = None  # its place among jobs of one priority; None: submitted_at
    over_limit: str = ""  # the limit on cost or time that it has reached: it is being stopped

    @property
    def ended(self) -> bool:
        return self.state in ENDED_STATES
