"""Hosts: the VMs of a slice, with the last report of the agent on each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NewType

from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.attempts import AttemptId, EnvironmentReport, Moment, Startup
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.values.bounds import Seconds, StepNumber

HostId = NewType("HostId", str)  # "{slice}/{index}"


def host_id(slice_id: SliceId, index: int) -> HostId:
    return HostId(f"{slice_id}/{index}")


def slice_id_of(host: HostId) -> SliceId:
    return SliceId(host.rpartition("/")[0])


class Phase(StrEnum):
    """What the agent is doing for its attempt."""

    IDLE = "idle"  # no workload, and no process left over
    SETUP = "setup"
    RUNNING = "running"
    STOPPING = "stopping"
    EXITED = "exited"  # the whole process group is gone


class NoticeKind(StrEnum):
    PREEMPTED = "preempted"
    MAINTENANCE = "maintenance"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How a workload ended on one host. Reported once its whole process group is gone."""

    at: Moment
    during_setup: bool = False
    status: int | None = None  # exit status; None when a signal ended it
    signal: int | None = None
    stopped_by_agent: bool = False  # after SIGTERM from the agent
    oom_killed: bool = False
    evidence: EndReason | None = None  # from the last log lines
    log_line: str = ""  # the line that says why, else the last line of output
    unexplained: bool = False  # nothing says why: the last line of output is only that

    @property
    def clean(self) -> bool:
        return self.status == 0 and not self.during_setup


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    id: HostId
    slice_id: SliceId
    index: int
    address: str = ""  # where other hosts of the gang reach it
    coordinator_port: int = 0
    boot: str = ""  # changes when the agent is a new process
    heartbeat_seq: int = 0  # of the heartbeat that this row is from
    past_boots: tuple[str, ...] = ()  # earlier agent processes, newest first
    attempt_id: AttemptId | None = None
    phase: Phase = Phase.IDLE
    exit: Exit | None = None
    notice: NoticeKind | None = None
    up_at: datetime | None = None  # first heartbeat; None until then
    environment: EnvironmentReport | None = None  # of its attempt
    startup: Startup | None = None  # of its attempt, by its own clock
    clock_offset: timedelta = timedelta(0)  # from its clock to that of the server


# A late heartbeat of an agent that is gone is recognised this many restarts later.
MAX_PAST_BOOTS = 8


# What no program counts to is refused, and no database could hold it.


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress reported by a workload."""

    step: StepNumber | None = None
    total: StepNumber | None = None
    checkpoint_step: StepNumber | None = None
    at: datetime | None = None
    message: str = ""
    metrics: dict[str, float] | None = None
    save_seconds: Seconds = 0.0  # so far, for saving checkpoints
    output_at: datetime | None = None  # when it last wrote to its log, or began to run


# In `progress.json` and in one heartbeat. A program that reports faster is thinned.
MAX_RECENT_POINTS = 50
MAX_HEARTBEAT_POINTS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressPoint:
    """What a workload reported at one moment."""

    at: datetime
    step: StepNumber | None = None
    metrics: dict[str, float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramTimings:
    """What a program that uses `tpufleet.runtime` did besides steps, so far."""

    imported_at: Moment | None = None
    connect_seconds: Seconds = 0.0
    restore_seconds: Seconds = 0.0
    compile_seconds: Seconds = 0.0
    save_seconds: Seconds = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressFile(Progress):
    """`progress.json`: the latest report, and those shortly before it."""

    recent: tuple[ProgressPoint, ...] = ()  # oldest first
    timings: ProgramTimings = ProgramTimings()

    @property
    def latest(self) -> Progress:
        return Progress(
            step=self.step,
            total=self.total,
            checkpoint_step=self.checkpoint_step,
            at=self.at,
            message=self.message,
            metrics=self.metrics,
            save_seconds=self.timings.save_seconds,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLiveness:
    """The last heartbeat of a host. Stored apart from hosts, because it changes constantly."""

    host_id: HostId
    seen_at: datetime
    attempt_id: AttemptId | None = None
    progress: Progress | None = None
