"""Hosts: the VMs of a slice, and what the agent on each last said."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NewType

from tpufleet.model.attempts import AttemptId
from tpufleet.model.end_reasons import EndReason
from tpufleet.model.slices import SliceId

HostId = NewType("HostId", str)  # "{slice}/{index}"


def host_id(slice_id: SliceId, index: int) -> HostId:
    return HostId(f"{slice_id}/{index}")


def slice_id_of(host: HostId) -> SliceId:
    return SliceId(host.rpartition("/")[0])


class Phase(StrEnum):
    """What the agent does for the attempt it names."""

    IDLE = "idle"  # no workload, and none is left over
    SETUP = "setup"
    RUNNING = "running"
    STOPPING = "stopping"
    EXITED = "exited"  # the whole process group is gone


class NoticeKind(StrEnum):
    PREEMPTED = "preempted"
    MAINTENANCE = "maintenance"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How a workload ended on one host. Reported only when its whole process group is gone."""

    at: datetime
    during_setup: bool = False
    status: int | None = None  # exit status; None when a signal ended it
    signal: int | None = None
    stopped_by_agent: bool = False  # after SIGTERM from the agent
    oom_killed: bool = False
    evidence: EndReason | None = None  # what the last log lines point to
    log_line: str = ""  # the line that says so, or the last line

    @property
    def clean(self) -> bool:
        return self.status == 0 and not self.during_setup


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    id: HostId
    slice_id: SliceId
    index: int
    address: str = ""  # how other hosts of the gang reach it
    coordinator_port: int = 0
    boot: str = ""  # changes when the agent is a new process
    attempt_id: AttemptId | None = None
    phase: Phase = Phase.IDLE
    exit: Exit | None = None
    notice: NoticeKind | None = None
    up_at: datetime | None = None  # first heartbeat; None until then
    lost_at: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a workload says it is."""

    step: int | None = None
    total: int | None = None
    checkpoint_step: int | None = None
    at: datetime | None = None
    message: str = ""
    metrics: dict[str, float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLiveness:
    """A sign of life. Kept apart from hosts: it changes all the time and explains nothing."""

    host_id: HostId
    seen_at: datetime
    attempt_id: AttemptId | None = None
    progress: Progress | None = None
