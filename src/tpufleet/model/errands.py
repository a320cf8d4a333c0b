"""Errands: commands and check-ups that a person has run on hosts, through their agents."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from tpufleet.model.hosts import HostId
from tpufleet.model.slices import SliceId


class ErrandKind(StrEnum):
    COMMAND = "command"
    CHECKUP = "checkup"  # look for trouble
    MEND = "mend"  # and mend what is safe to mend


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    """Control plane → agent. Run once, whatever else the host does."""

    id: str
    kind: ErrandKind
    command: tuple[str, ...] = ()  # argv; no shell unless somebody names one
    timeout: timedelta = timedelta(minutes=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrandOrder:
    """A person → control plane. The sender chooses the id, so that sending twice is one errand."""

    id: str
    kind: ErrandKind = ErrandKind.COMMAND
    command: tuple[str, ...] = ()
    host: int | None = None  # index in the slice; None: all
    timeout: timedelta = timedelta(minutes=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrandResult:
    """What came of an errand on one host."""

    host_id: HostId
    status: int | None  # None: it did not start, or was ended for taking too long
    output: str
    cut: bool = False  # there was more output than is kept
    at: datetime | None = None  # by the host's clock
    words: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SentErrand:
    """An errand on its way. Kept only while somebody may wait for it: commands are people's own."""

    errand: Errand
    slice_id: SliceId
    hosts: tuple[HostId, ...]
    sent_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrandReport:
    id: str
    hosts: tuple[HostId, ...]  # that it was given to
    results: tuple[ErrandResult, ...]
    now: datetime

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.hosts)


class Health(StrEnum):
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that a check-up looked at."""

    check: str
    health: Health
    words: str  # what was found
    meaning: str = ""  # and what that means for jobs
    mended: bool = False
    cure: str = ""  # what a person can do


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkup:
    findings: tuple[Finding, ...]
    at: datetime
