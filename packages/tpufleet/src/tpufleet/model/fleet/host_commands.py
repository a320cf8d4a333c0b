"""Host commands: commands and diagnostics that a user runs on hosts, through their agents."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import JobId

# Of a file that a host sends with its result, and of the part of it that one request carries.
MAX_FILE_BYTES = 64 * 1024 * 1024
FILE_CHUNK_BYTES = 2 * 1024 * 1024
MAX_PROFILE = timedelta(minutes=1)
MAX_TIMEOUT = timedelta(hours=1)
# An agent gets the command with its next heartbeat and reports with the one after.
HEARTBEAT_ALLOWANCE = timedelta(seconds=20)


class HostCommandKind(StrEnum):
    COMMAND = "command"
    DIAGNOSE = "diagnose"  # run every check
    REPAIR = "repair"  # and repair what is safe to repair
    PROFILE = "profile"  # record a trace of the job's program; its archive is a file of the result


class HostCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Server → agent. Run once, beside the workload."""

    id: str
    kind: HostCommandKind
    command: tuple[str, ...] = ()  # argv; no shell unless the user names one
    timeout: timedelta = timedelta(minutes=1)
    duration: timedelta = timedelta(0)  # of a profile


class HostCommandRequest(HostCommand, frozen=True, kw_only=True):
    """User → server. The sender chooses the id, so that a resend is the same command."""

    kind: HostCommandKind = HostCommandKind.COMMAND
    host: int | None = None  # index in the slice; None: all


class HostCommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome on one host."""

    host_id: HostId
    status: int | None  # None: it did not start, or timed out
    output: str
    truncated: bool = False  # there was more output
    at: datetime | None = None  # by the host's clock
    message: str = ""


class SentHostCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command in flight. Deleted soon after, because commands are private to their users."""

    host_command: HostCommand
    slice_id: SliceId
    hosts: tuple[HostId, ...]
    sent_at: datetime
    job_id: JobId | None = None  # only while this job holds the slice; None: at any time


class HostCommandReport(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    hosts: tuple[HostId, ...]  # that it was sent to
    results: tuple[HostCommandResult, ...]
    now: datetime

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.hosts)


class Health(StrEnum):
    OK = "good"
    WARNING = "warn"
    FAILED = "bad"


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one check."""

    check: str
    health: Health
    message: str  # what was observed
    impact: str = ""  # what that means for jobs
    repaired: bool = False
    remedy: str = ""  # what a user can do

    @classmethod
    def ok(cls, check: str, message: str, remedy: str = "", repaired: bool = False) -> CheckResult:
        return cls(check=check, health=Health.OK, message=message, remedy=remedy, repaired=repaired)

    @classmethod
    def warning(cls, check: str, message: str, impact: str, remedy: str = "") -> CheckResult:
        return cls(
            check=check, health=Health.WARNING, message=message, impact=impact, remedy=remedy
        )

    @classmethod
    def failed(cls, check: str, message: str, impact: str = "", remedy: str = "") -> CheckResult:
        return cls(check=check, health=Health.FAILED, message=message, impact=impact, remedy=remedy)


class DiagnosticReport(msgspec.Struct, frozen=True, kw_only=True):
    checks: tuple[CheckResult, ...]
    at: datetime
