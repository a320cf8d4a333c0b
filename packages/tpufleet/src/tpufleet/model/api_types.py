"""Request and response bodies of the HTTP API. Service and client share them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

import msgspec

from tpufleet.model.events import Event
from tpufleet.model.fleet.hosts import HostId, NoticeKind, Phase, Progress
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.reservations import DEFAULT_DURATION, Reservation
from tpufleet.model.fleet.slices import LossReason, SliceId, SliceState
from tpufleet.model.job.attempts import Attempt, AttemptState, Recovery
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import Capacity, Job, JobId, JobState
from tpufleet.model.job.metric_points import MetricPoint
from tpufleet.model.people.audit import AuditEntry
from tpufleet.model.people.notifications import (
    DEFAULT_EVENTS,
    ChannelKind,
    Delivery,
    NotificationChannel,
    NotifyOn,
)
from tpufleet.model.people.users import Role, TokenScope, User


class JobRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job in one line. A Struct, because a page of ten thousand is built five times faster; it
    has no cycles, so the garbage collector can ignore it."""

    id: JobId
    name: str
    owner: str
    state: JobState
    reason: str
    accelerator: str
    slices: int
    pool: str | None
    priority: int
    tags: tuple[str, ...]
    submitted_at: datetime
    ended_at: datetime | None
    attempts: int
    progress: Progress | None  # of process 0; after an attempt, the last of any process
    parent: JobId | None
    notes: str = ""
    held_by: str | None = None  # a user who keeps it from being placed
    simulated: bool = False  # in the answer to a submission: it gets simulated slices


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    jobs: tuple[JobRow, ...]
    next: JobId | None = None  # pass it as `before` for the next page


class HostRow(msgspec.Struct, frozen=True, kw_only=True):
    """A host of a live attempt."""

    id: HostId
    process: int  # rank in the whole gang; names the host in logs
    slice_id: SliceId
    address: str
    phase: Phase
    notice: NoticeKind | None
    seen_at: datetime | None
    progress: Progress | None


class SliceRow(msgspec.Struct, frozen=True, kw_only=True):
    id: SliceId
    provider: str
    accelerator: str
    zone: str
    capacity: Capacity
    state: SliceState
    reason: str
    loss: LossReason | None
    pool: str | None
    job_id: JobId | None
    hosts: int
    hosts_seen: int  # with a recent heartbeat
    requested_at: datetime
    ready_at: datetime | None
    gone_at: datetime | None
    chips: int
    reserved_for: str | None = None  # kept for this user after a failure
    reserved_until: datetime | None = None
    node: str = ""  # adopted: the name of the node that a person made


class JobDetail(msgspec.Struct, frozen=True, kw_only=True):
    job: Job
    row: JobRow
    attempts: tuple[Attempt, ...]
    slices: tuple[SliceRow, ...]  # held for it now
    hosts: tuple[HostRow, ...]  # of the live attempt
    children: tuple[JobRow, ...]  # resumed from it, or run again
    processes: int = 1  # hosts of all its slices: one log each
    files_deleted_at: datetime | None = None  # its code, logs and results
    recoveries: tuple[Recovery, ...] = ()  # from a fault to the next step
    # Of each attempt, the share of its time in steps that count; None: not known.
    goodput: tuple[float | None, ...] = ()


class AttemptSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt in one sentence."""

    number: int
    state: AttemptState
    end_reason: EndReason | None
    message: str


class SourceState(StrEnum):
    """How far a job came with one source of capacity."""

    UNTRIED = "not tried"
    REFUSED = "refused"
    REQUESTED = "requested"
    BOOTING = "booting"
    READY = "ready"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceStatus:
    """A source that a waiting job may get its slices from."""

    provider: str
    zone: str
    capacity: Capacity
    state: SourceState
    message: str = ""  # the last answer
    detail: str = ""  # its whole text, where the message is a summary
    at: datetime | None = None  # of the last answer or request
    retry_at: datetime | None = None  # not requested from before
    usd_per_hour: float | None = None  # of all slices of the job; None: not known, or simulated


@dataclass(frozen=True, kw_only=True, slots=True)
class JobExplanation:
    """Why a job waits, what it is doing, or why it ended."""

    job_id: JobId
    state: JobState
    message: str  # the answer in one sentence
    details: tuple[str, ...] = ()  # the evidence, one sentence each
    until: datetime | None = None  # when something will change, if known
    ahead: int | None = None  # jobs before it in the same queue
    advice: str = ""
    attempts: tuple[AttemptSummary, ...] = ()
    sources: tuple[SourceStatus, ...] = ()  # while it waits, best first


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job to submit. The sender chooses the id, so that a resend is the same job."""

    id: JobId
    spec: dict[str, Any]  # as in a job file
    snapshot: str | None = None


class SubmitRequest(msgspec.Struct, frozen=True, kw_only=True):
    jobs: tuple[NewJob, ...]


class ResubmitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Resume or rerun a job."""

    id: JobId  # of the new job, chosen by the sender
    changes: dict[str, Any] = {}  # job file fields that differ
    snapshot: str | None = None  # digest of new code; None: the code of the parent


@dataclass(frozen=True, kw_only=True, slots=True)
class JobChanges:
    """Change a live or ended job. Fields that are missing stay as they are."""

    name: str | None = None
    tags: tuple[str, ...] | None = None  # all tags; then `add_tags` and `remove_tags` apply
    add_tags: tuple[str, ...] = ()
    remove_tags: tuple[str, ...] = ()  # `*` and `?` are wildcards
    notes: str | None = None
    priority: int | None = None


class MetricSeries(msgspec.Struct, frozen=True, kw_only=True):
    """What a job reported over time, thinned to a bounded number of points."""

    job_id: JobId
    name: str
    points: tuple[MetricPoint, ...]  # oldest first


class FileDifference(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    change: str  # added, deleted or changed
    diff: str  # unified; empty for binary and large files


class CodeDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The code of one job, compared with that of the first."""

    job_id: JobId
    same: bool
    files: tuple[FileDifference, ...] = ()
    message: str = ""  # why it cannot be compared, or how many more files differ


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Values are in the order of `jobs`; None where a job has none."""

    jobs: tuple[JobRow, ...]
    config: dict[str, tuple[str | None, ...]]  # only what differs
    metrics: dict[str, tuple[float | None, ...]]  # last values
    code: tuple[CodeDifference, ...]  # of each job but the first


class QueueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A job that waits."""

    job: JobRow
    queue: str  # pool, or TPU type of jobs without a pool
    position: int | None  # from 1; None while it is held
    blocked_by: str
    behind: str | None  # OWNER/NAME of the job whose end it waits for, if known
    behind_until: datetime | None  # when that job ends at the latest
    earliest_start: datetime | None  # as far as time limits tell
    owner_chip_hours: float  # decayed usage, which decides between users


class QueuePage(msgspec.Struct, frozen=True, kw_only=True):
    entries: tuple[QueueEntry, ...]


class QueueMove(msgspec.Struct, frozen=True, kw_only=True):
    """One of these."""

    first: bool = False
    last: bool = False
    before: str | None = None  # another job in the same queue


class NewReservation(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # chosen by the sender, so that a resend is the same reservation
    pool: str
    slices: int | None = None  # None: all of the pool
    starts_at: datetime | None = None  # None: now
    duration: timedelta = DEFAULT_DURATION
    note: str = ""


class ReservationExtension(msgspec.Struct, frozen=True, kw_only=True):
    extend_by: timedelta = DEFAULT_DURATION


class ReservationPage(msgspec.Struct, frozen=True, kw_only=True):
    reservations: tuple[Reservation, ...]


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    events: tuple[Event, ...]
    last: int  # pass it as `after` for the next page


class SlicePage(msgspec.Struct, frozen=True, kw_only=True):
    slices: tuple[SliceRow, ...]


class StoredSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    digest: str  # to pass with a job


class AdoptRequest(msgspec.Struct, frozen=True, kw_only=True):
    node: str  # that a person made
    zone: str
    pool: str


class AdoptedNode(msgspec.Struct, frozen=True, kw_only=True):
    slice_id: SliceId  # that the node becomes


class NewChannel(msgspec.Struct, frozen=True, kw_only=True):
    """Where notifications go. `address` is an e-mail address, or the URL of a webhook."""

    kind: ChannelKind
    address: str
    on: tuple[NotifyOn, ...] = DEFAULT_EVENTS


class CreatedChannel(msgspec.Struct, frozen=True, kw_only=True):
    channel: NotificationChannel
    signing_key: str  # of a webhook; returned once


class ChannelPage(msgspec.Struct, frozen=True, kw_only=True):
    channels: tuple[NotificationChannel, ...]


class DeliveryPage(msgspec.Struct, frozen=True, kw_only=True):
    deliveries: tuple[Delivery, ...]  # newest first


class PoolPage(msgspec.Struct, frozen=True, kw_only=True):
    pools: tuple[Pool, ...]


class FaultRequest(msgspec.Struct, frozen=True, kw_only=True):
    fault: str
    host: int | None = None  # index in the slice


class CurrentUser(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    role: Role
    version: str
    token_id: str = ""
    scope: TokenScope = TokenScope.FULL


class BrowserSession(msgspec.Struct, frozen=True, kw_only=True):
    user: str
    role: Role
    csrf: str  # to send in the header X-Tpufleet-Csrf with every change; only at the login
    id: str = ""  # among the tokens of the user


class LoginLink(msgspec.Struct, frozen=True, kw_only=True):
    path: str  # on this server; valid once, for two minutes


class NewUser(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    role: Role = Role.MEMBER
    service: bool | None = None  # a service account; None: as it was
    take_over: bool = False  # own the jobs of a deleted user of this name


class DeletedUser(msgspec.Struct, frozen=True, kw_only=True):
    """What ended with the user."""

    done: bool = True
    jobs: int = 0  # cancelled
    tokens: int = 0
    secrets: int = 0
    reservations: int = 0
    pools: tuple[str, ...] = ()  # that they were a member of


class UserPage(msgspec.Struct, frozen=True, kw_only=True):
    users: tuple[User, ...]


class NewToken(msgspec.Struct, frozen=True, kw_only=True):
    user: str | None = None  # the caller, when missing
    note: str = ""
    expires_in: timedelta | None = None  # None: never; service accounts: after 90 days
    scope: TokenScope = TokenScope.FULL


class TokenRotation(msgspec.Struct, frozen=True, kw_only=True):
    overlap: timedelta = timedelta(hours=1)  # for which the old token stays valid


class CreatedToken(msgspec.Struct, frozen=True, kw_only=True):
    """The token itself is shown only here."""

    id: str
    user: str
    token: str
    expires_at: datetime | None = None
    scope: TokenScope = TokenScope.FULL


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    user: str
    note: str
    created_at: datetime
    last_used_at: datetime | None
    expires_at: datetime | None = None
    scope: TokenScope = TokenScope.FULL
    session_of: str | None = None  # of a browser session: id of the token that logged it in


class RevokedTokens(msgspec.Struct, frozen=True, kw_only=True):
    revoked: tuple[TokenRow, ...]  # with those that were created with them
    remaining: tuple[TokenRow, ...] = ()  # created with them for other users


class AuditPage(msgspec.Struct, frozen=True, kw_only=True):
    entries: tuple[AuditEntry, ...]  # newest first


class TokenPage(msgspec.Struct, frozen=True, kw_only=True):
    tokens: tuple[TokenRow, ...]


class SecretValue(msgspec.Struct, frozen=True, kw_only=True):
    value: str
    shared: bool = False  # available to all users, not only the caller


class SecretNames(msgspec.Struct, frozen=True, kw_only=True):
    own: tuple[str, ...]
    shared: tuple[str, ...]


class JobSelection(msgspec.Struct, frozen=True, kw_only=True):
    jobs: tuple[str, ...]  # references


class PurgeRequest(JobSelection, frozen=True, kw_only=True):
    """Delete the logs, results and code of these jobs."""

    checkpoints: bool = False  # delete checkpoints too
    dry_run: bool = False


class PurgedJob(msgspec.Struct, frozen=True, kw_only=True):
    id: JobId
    name: str
    owner: str
    state: JobState
    ended_at: datetime | None
    size: int  # bytes of logs and results
    checkpoint_size: int  # bytes, whether deleted or not
    with_checkpoints: bool  # they are deleted
    checkpoints_used_by: tuple[JobId, ...] = ()  # other jobs, for which they are kept


@dataclass(frozen=True, kw_only=True, slots=True)
class PurgeReport:
    jobs: tuple[PurgedJob, ...]
    code_size: int  # bytes of code that no other job uses

    @property
    def size(self) -> int:
        """Bytes of everything that is deleted."""
        checkpoints = sum(row.checkpoint_size for row in self.jobs if row.with_checkpoints)
        return self.code_size + sum(row.size for row in self.jobs) + checkpoints


class LogSize(msgspec.Struct, frozen=True, kw_only=True):
    size: int  # bytes of this host's log on the server


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    host: int  # process number in the gang
    attempt: int
    line: str


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request failed."""

    kind: str  # name of a class in `tpufleet.errors`
    message: str


# Header with the error, percent-encoded: a response to HEAD has no body.
ERROR_HEADER = "X-Tpufleet-Error"


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorDetail


class NewLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link to a file of a job that works without a token."""

    resource: str  # `logs` or `result`
    expires_in: timedelta


class SignedLink(msgspec.Struct, frozen=True, kw_only=True):
    path: str  # with its query; the server's address precedes it
    expires_at: datetime


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True):
    """The request succeeded; there is nothing to return."""

    done: bool = True
