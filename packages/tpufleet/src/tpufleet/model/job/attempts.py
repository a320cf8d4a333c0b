"""Attempts: one execution of a job on one gang. Immutable once ended."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, NewType

import msgspec

from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.end_reasons import END_REASONS, EndReason
from tpufleet.model.job.jobs import JobId
from tpufleet.model.values.bounds import Seconds, StepNumber

AttemptId = NewType("AttemptId", str)


class AttemptState(StrEnum):
    STARTING = "starting"  # hosts fetch the code and run setup
    RUNNING = "running"  # every host runs the command
    STOPPING = "stopping"  # processes were signalled; not all are known to be gone
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentReport:
    """How the Python environment of an attempt was made on one host."""

    source: str  # where the dependencies were declared
    seconds: float
    packages: int
    cached: int  # of them, from the cache on the host

    @property
    def text(self) -> str:
        return (
            f"{self.packages} packages, {self.cached} from the cache, in {self.seconds:.1f} s "
            f"(from {self.source})"
        )


# A moment that says its time zone.
Moment = Annotated[datetime, msgspec.Meta(tz=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Startup:
    """How process 0 of an attempt came to its first step. None: not known, or not there yet."""

    assigned_at: Moment  # its agent began with the code, the Python environment and setup
    started_at: Moment  # the command
    imported_at: Moment | None = None  # it called tpufleet.runtime.initialize
    connect_seconds: Seconds = 0.0  # until jax.distributed had joined all processes
    restore_seconds: Seconds = 0.0
    compile_seconds: Seconds = 0.0
    stepped_at: Moment | None = None  # it reported a step
    first_step: StepNumber | None = None  # that step
    advanced_at: Moment | None = None  # it reported a step beyond those of earlier attempts
    checkpoint_step: StepNumber | None = None  # of the newest checkpoint when it began


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """From a fault to the first step beyond the last one before it."""

    attempt: int  # that made this step
    reason: EndReason  # why the attempt before it ended
    fault_at: datetime
    seconds: float
    parts: dict[str, float]  # seconds, in order; those that took no time are left out
    resumed_step: int | None = None
    lost_steps: int | None = None  # made again

    @property
    def text(self) -> str:
        resumed = ""
        if self.resumed_step is not None:
            steps = "step" if self.lost_steps == 1 else "steps"
            again = f", {self.lost_steps} {steps} again" if self.lost_steps else ""
            resumed = f"resumed at step {self.resumed_step}{again}; "
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.parts.items())
        return (
            f"attempt {self.attempt}: {resumed}next step {self.seconds:.1f} s after "
            f"{END_REASONS[self.reason].description} ({parts})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    id: AttemptId
    job_id: JobId
    number: int  # from 0
    slices: tuple[SliceId, ...]  # in slice order: the index is MEGASCALE_SLICE_ID
    created_at: datetime
    state: AttemptState = AttemptState.STARTING
    running_at: datetime | None = None
    clock_step: timedelta = timedelta(0)  # by which the clock was set forward while it ran
    stopping_at: datetime | None = None
    stop_reason: EndReason | None = None  # why it was stopped; None: a process ended first
    # While it stops: a process is gone or hangs, so the others can complete no step.
    aborted: bool = False
    ended_at: datetime | None = None
    # When the process failed that decided the verdict, or when the last progress was reported
    # before a hang or the silence of a host; else as `stopping_at`.
    fault_at: datetime | None = None
    end_reason: EndReason | None = None  # None while it is live
    message: str = ""  # the verdict: exit status, host and log line
    failed_host: str | None = None  # the host whose exit decided the verdict
    # More slices are ready: it is stopped for them when it has a newer checkpoint than this one.
    grows_after: int | None = None
    start_step: int | None = None  # latest checkpoint when it started
    checkpoint_step: int | None = None  # latest checkpoint when it ended
    last_step: int | None = None  # latest step when it ended
    total_steps: int | None = None  # as last reported
    progress_message: str = ""
    progress_at: datetime | None = None
    metrics: dict[str, float] | None = None
    save_seconds: float = 0.0  # of its time, for saving checkpoints
    startup: Startup | None = None
    environment: EnvironmentReport | None = None  # of the slowest host; None: made without uv

    @property
    def live(self) -> bool:
        return self.state is not AttemptState.ENDED


def attempt_id(job_id: JobId, number: int) -> AttemptId:
    return AttemptId(f"{job_id}.{number}")
