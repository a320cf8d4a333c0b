"""Messages between an agent and the server.

A new field has a default, and unknown fields are ignored, so that agents and servers may differ in
them. Any other change, such as a new enum value, raises `PROTOCOL`, and a server refuses what it
cannot read with both numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

import msgspec

from tpufleet.model.fleet.host_commands import HostCommand
from tpufleet.model.fleet.hosts import Exit, HostId, NoticeKind, Phase, Progress, ProgressPoint
from tpufleet.model.job.attempts import AttemptId, EnvironmentReport, Startup
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import JobId

PROTOCOL = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """Agent → server: the state of this host. Level-triggered: a resend has no effect."""

    host_id: HostId
    boot: str  # the agent process; changes when the agent starts again
    at: datetime  # by the host's clock, which may be wrong and step: never used to order
    address: str
    coordinator_port: int
    phase: Phase = Phase.IDLE
    attempt_id: AttemptId | None = None  # the attempt that phase, exit and progress are about
    exit: Exit | None = None
    notice: NoticeKind | None = None
    progress: Progress | None = None
    seq: int = 0  # increases with each heartbeat of this agent process; 0: not numbered
    protocol: int = PROTOCOL
    environment: EnvironmentReport | None = None  # once the Python of the attempt is ready
    startup: Startup | None = None  # of process 0, once its command runs
    points: tuple[ProgressPoint, ...] = ()  # since the last answered heartbeat, oldest first


class SliceTokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Agent → server: the first request of a host whose provider could only pass it a
    bootstrap token that others can read. A retry with the same `nonce` has the same result."""

    host_id: HostId
    nonce: str


class SliceTokenReply(msgspec.Struct, frozen=True, kw_only=True):
    """Server → agent: the token of the slice, issued once to each host."""

    token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Server → agent: what this host must run. The attempt id is the fencing token."""

    attempt_id: AttemptId
    job_id: JobId
    number: int
    command: tuple[str, ...]
    setup: tuple[str, ...]
    env: dict[str, str]
    secrets: dict[str, str]  # resolved values, in memory only; empty once the agent reports it
    snapshot: str | None
    checkpoint: str
    grace: timedelta
    worker_id: int  # index of the host in its slice
    hostnames: tuple[str, ...]  # of this slice, in order
    slice_index: int
    num_slices: int
    process_id: int  # over the whole gang, for one process on each host
    num_processes: int
    coordinator_address: str  # host:port of process 0
    megascale_coordinator: str  # host of process 0
    chips: int  # on this host
    accelerator: str
    last_step: int | None = None  # that earlier attempts have reported
    stop: EndReason | None = None  # set: stop the workload gracefully
    stop_message: str = ""  # what the log says of it; empty: what `stop` means
    abort: bool = False  # it can complete no step: give it time only for a save that has begun
    python: str | None = None  # of the job's environment; see JobSpec
    dependencies: tuple[str, ...] | None = None
    image: str | None = None
    metrics: dict[str, str] = field(default_factory=dict)  # name → pattern for lines of the log
    owned_by_admin: bool = False  # who may act as the server's user anyway
    token: str = field(default="", repr=False)  # for its processes; empty once the agent reports it
    max_slices: int = 0  # that the job asks for: `num_slices` may be fewer; 0: as many
    processes_per_host: int = 1  # that share its chips
    owner: str = ""  # caches on the host are apart by owner; empty: a server that does not say


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatReply:
    """What to run now (None: stop any workload), and when to send the next heartbeat."""

    assignment: Assignment | None
    next_heartbeat: timedelta
    lease: timedelta  # without a reply for this long, stop the workload
    release: bool = False  # this slice is being released: stop and exit
    host_commands: tuple[HostCommand, ...] = ()  # to be run beside the workload, each once
    protocol: int = PROTOCOL
