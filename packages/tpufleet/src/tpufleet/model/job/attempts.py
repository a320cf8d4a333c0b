"""Attempts: one execution of a job on one gang. Immutable once ended."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NewType

from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import JobId

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
    end_reason: EndReason | None = None  # None while it is live
    message: str = ""  # the verdict: exit status, host and log line
    failed_host: str | None = None  # the host whose exit decided the verdict
    start_step: int | None = None  # latest checkpoint when it started
    checkpoint_step: int | None = None  # latest checkpoint when it ended
    last_step: int | None = None  # latest step when it ended
    total_steps: int | None = None  # as last reported
    progress_message: str = ""
    progress_at: datetime | None = None
    metrics: dict[str, float] | None = None
    environment: EnvironmentReport | None = None  # of the slowest host; None: made without uv

    @property
    def live(self) -> bool:
        return self.state is not AttemptState.ENDED


def attempt_id(job_id: JobId, number: int) -> AttemptId:
    return AttemptId(f"{job_id}.{number}")
