"""The state of the server: its leader, and what its providers answered last."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import msgspec

from tpufleet.model.fleet.pools import CapacityRefusal
from tpufleet.model.job.jobs import JobState

# Name in the store's metadata under which the leader reports.
CONTROLLER_REPORT = "controller_report"
# Prefix of the objects by which servers that share a store say that they run.
SERVERS_PREFIX = "servers/"
# Not a call of ours: hosts of the provider that call this server.
CONTACT = "contact from hosts"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderProblem:
    """A call that fails, until it succeeds again."""

    call: str  # "listing", "request", "release" or CONTACT
    message: str
    since: datetime
    last_at: datetime
    count: int = 1
    zone: str | None = None  # None: all zones
    retry_at: datetime | None = None  # when it is tried again, if known


class ProviderHealth(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    answered_at: datetime | None = None  # last successful call
    problems: tuple[ProviderProblem, ...] = ()
    zones: tuple[str, ...] = ()  # that jobs without zones are placed in, best first
    default: bool = False  # of jobs that name no provider


class ControllerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Written by the controller that holds the lease."""

    holder: str
    leader_since: datetime
    reported_at: datetime
    providers: tuple[ProviderHealth, ...] = ()
    version: str = ""  # of tpufleet
    server_url: str = ""  # that hosts of its slices connect to
    slices_per_user: int | None = None  # the quota over all pools


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedError:
    """A warning or an error in the log of this server."""

    at: datetime  # the last time
    level: str
    message: str
    count: int = 1


class LocalJobs(msgspec.Struct, frozen=True, kw_only=True):
    """Which guarantee holds for jobs on the provider `local`, which run on the server's machine."""

    description: str
    isolated: bool  # they cannot see the server's state


class SeenServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server that uses the same store."""

    name: str
    version: str
    seen_at: datetime  # when it last said that it runs


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    now: datetime
    controller: ControllerReport | None  # None: no controller has reported yet
    controller_stale: bool  # its last report is too old: no controller is running
    jobs: dict[JobState, int]
    slices: int  # that exist or are requested
    waiting_for: tuple[CapacityRefusal, ...] = ()  # sources that are not requested from now
    oldest_queued_at: datetime | None = None  # when the job that waits longest was submitted
    hosts: int = 0  # that sent a heartbeat within two minutes
    started_at: datetime | None = None  # of the server that answers
    server: str = ""  # the one that answers, named as the holder of the controller's lease
    servers: tuple[SeenServer, ...] = ()  # of the last hour, with this one, if several may run
    errors: tuple[LoggedError, ...] = ()  # of the server that answers, in the last hour
    local_jobs: LocalJobs | None = None  # None: the provider is off
