"""Errands: commands and check-ups that a person has run on hosts, through their agents."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from tpufleet.model.hosts import HostId
from tpufleet.model.slices import SliceId


class HostCommandKind(StrEnum):
    COMMAND = "command"
    DIAGNOSE = "checkup"  # look for trouble
    REPAIR = "mend"  # and mend what is safe to mend


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCommand:
    """Control plane → agent. Run once, whatever else the host does."""

    id: str
    kind: HostCommandKind
    command: tuple[str, ...] = ()  # argv; no shell unless somebody names one
    timeout: timedelta = timedelta(minutes=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCommandRequest:
    """A person → control plane. The sender chooses the id, so that sending twice is one errand."""

    id: str
    kind: HostCommandKind = HostCommandKind.COMMAND
    command: tuple[str, ...] = ()
    host: int | None = None  # index in the slice; None: all
    timeout: timedelta = timedelta(minutes=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCommandResult:
    """What came of an errand on one host."""

    host_id: HostId
    status: int | None  # None: it did not start, or was ended for taking too long
    output: str
    truncated: bool = False  # there was more output than is kept
    at: datetime | None = None  # by the host's clock
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SentHostCommand:
    """An errand on its way. Kept only while somebody may wait for it: commands are people's own."""

    host_command: HostCommand
    slice_id: SliceId
    hosts: tuple[HostId, ...]
    sent_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCommandReport:
    id: str
    hosts: tuple[HostId, ...]  # that it was given to
    results: tuple[HostCommandResult, ...]
    now: datetime

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.hosts)


class Health(StrEnum):
    OK = "good"
    WARNING = "warn"
    FAILED = "bad"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """One thing that a check-up looked at."""

    check: str
    health: Health
    message: str  # what was found
    impact: str = ""  # and what that means for jobs
    repaired: bool = False
    remedy: str = ""  # what a person can do


@dataclass(frozen=True, kw_only=True, slots=True)
class DiagnosticReport:
    checks: tuple[CheckResult, ...]
    at: datetime
