"""Request and response bodies of the HTTP API. Service and client share them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

import msgspec

from tpufleet.model.events import Event
from tpufleet.model.fleet.hosts import HostId, NoticeKind, Phase, Progress
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.reservations import DEFAULT_DURATION, Reservation
from tpufleet.model.fleet.slices import LossReason, SliceId, SliceState
from tpufleet.model.job.attempts import Attempt, AttemptState
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


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPage:
    jobs: tuple[JobRow, ...]
    next: JobId | None = None  # pass it as `before` for the next page


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRow:
    """A host of a live attempt."""

    id: HostId
    process: int  # rank in the whole gang; names the host in logs
    slice_id: SliceId
    address: str
    phase: Phase
    notice: NoticeKind | None
    seen_at: datetime | None
    progress: Progress | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceRow:
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
    chips: int = 0  # an older server does not send it
    reserved_for: str | None = None  # kept for this user after a failure
    reserved_until: datetime | None = None
    node: str = ""  # adopted: the name of the node that a person made


@dataclass(frozen=True, kw_only=True, slots=True)
class JobDetail:
    job: Job
    row: JobRow
    attempts: tuple[Attempt, ...]
    slices: tuple[SliceRow, ...]  # held for it now
    hosts: tuple[HostRow, ...]  # of the live attempt
    children: tuple[JobRow, ...]  # resumed from it, or run again
    processes: int = 1  # hosts of all its slices: one log each
    files_deleted_at: datetime | None = None  # its code, logs and results


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSummary:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class NewJob:
    """A job to submit. The sender chooses the id, so that a resend is the same job."""

    id: JobId
    spec: dict[str, Any]  # as in a job file
    snapshot: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitRequest:
    jobs: tuple[NewJob, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResubmitRequest:
    """Resume or rerun a job."""

    id: JobId  # of the new job, chosen by the sender
    changes: dict[str, Any] = field(default_factory=dict)  # job file fields that differ
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LocationRelease:
    """Let others use a checkpoint location that job files name."""

    location: str
    reason: str = ""  # required of an admin, for that of another user


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSeries:
    """What a job reported over time, thinned to a bounded number of points."""

    job_id: JobId
    name: str
    points: tuple[MetricPoint, ...]  # oldest first


@dataclass(frozen=True, kw_only=True, slots=True)
class FileDifference:
    path: str
    change: str  # added, deleted or changed
    diff: str  # unified; empty for binary and large files


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeDifference:
    """The code of one job, compared with that of the first."""

    job_id: JobId
    same: bool
    files: tuple[FileDifference, ...] = ()
    message: str = ""  # why it cannot be compared, or how many more files differ


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Values are in the order of `jobs`; None where a job has none."""

    jobs: tuple[JobRow, ...]
    config: dict[str, tuple[str | None, ...]]  # only what differs
    metrics: dict[str, tuple[float | None, ...]]  # last values
    code: tuple[CodeDifference, ...]  # of each job but the first


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueEntry:
    """A job that waits."""

    job: JobRow
    queue: str  # pool, or TPU type of jobs without a pool
    position: int | None  # from 1; None while it is held
    blocked_by: str
    behind: str | None  # OWNER/NAME of the job whose end it waits for, if known
    behind_until: datetime | None  # when that job ends at the latest
    earliest_start: datetime | None  # as far as time limits tell
    owner_chip_hours: float  # decayed usage, which decides between users


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuePage:
    entries: tuple[QueueEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueMove:
    """One of these."""

    first: bool = False
    last: bool = False
    before: str | None = None  # another job in the same queue


@dataclass(frozen=True, kw_only=True, slots=True)
class NewReservation:
    id: str  # chosen by the sender, so that a resend is the same reservation
    pool: str
    slices: int | None = None  # None: all of the pool
    starts_at: datetime | None = None  # None: now
    duration: timedelta = DEFAULT_DURATION
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservationExtension:
    extend_by: timedelta = DEFAULT_DURATION


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservationPage:
    reservations: tuple[Reservation, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EventPage:
    events: tuple[Event, ...]
    last: int  # pass it as `after` for the next page


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicePage:
    slices: tuple[SliceRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSnapshot:
    digest: str  # to pass with a job


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptRequest:
    node: str  # that a person made
    zone: str
    pool: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptedNode:
    slice_id: SliceId  # that the node becomes


@dataclass(frozen=True, kw_only=True, slots=True)
class NewChannel:
    """Where notifications go. `address` is an e-mail address, or the URL of a webhook."""

    kind: ChannelKind
    address: str
    on: tuple[NotifyOn, ...] = DEFAULT_EVENTS


@dataclass(frozen=True, kw_only=True, slots=True)
class CreatedChannel:
    channel: NotificationChannel
    signing_key: str  # of a webhook; returned once


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelPage:
    channels: tuple[NotificationChannel, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeliveryPage:
    deliveries: tuple[Delivery, ...]  # newest first


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPage:
    pools: tuple[Pool, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultRequest:
    fault: str
    host: int | None = None  # index in the slice


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentUser:
    name: str
    role: Role
    version: str
    token_id: str = ""
    scope: TokenScope = TokenScope.FULL
    pool: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BrowserSession:
    user: str
    role: Role
    csrf: str  # to send in the header X-Tpufleet-Csrf with every change; only at the login
    id: str = ""  # among the tokens of the user


@dataclass(frozen=True, kw_only=True, slots=True)
class LoginLink:
    path: str  # on this server; valid once, for two minutes


@dataclass(frozen=True, kw_only=True, slots=True)
class NewUser:
    name: str
    role: Role = Role.MEMBER
    service: bool | None = None  # a service account; None: as it was
    take_over: bool = False  # own the jobs of a deleted user of this name


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletedUser:
    """What ended with the user."""

    done: bool = True
    jobs: int = 0  # cancelled
    tokens: int = 0
    secrets: int = 0
    reservations: int = 0
    pools: tuple[str, ...] = ()  # that they were a member of


@dataclass(frozen=True, kw_only=True, slots=True)
class UserPage:
    users: tuple[User, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NewToken:
    user: str | None = None  # the caller, when missing
    note: str = ""
    expires_in: timedelta | None = None  # None: never; service accounts: after 90 days
    scope: TokenScope = TokenScope.FULL
    pool: str | None = None  # limited to jobs in this pool


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRotation:
    overlap: timedelta = timedelta(hours=1)  # for which the old token stays valid


@dataclass(frozen=True, kw_only=True, slots=True)
class CreatedToken:
    """The token itself is shown only here."""

    id: str
    user: str
    token: str
    expires_at: datetime | None = None
    scope: TokenScope = TokenScope.FULL
    pool: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    id: str
    user: str
    note: str
    created_at: datetime
    last_used_at: datetime | None
    expires_at: datetime | None = None
    scope: TokenScope = TokenScope.FULL
    pool: str | None = None
    session_of: str | None = None  # of a browser session: id of the token that logged it in


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditPage:
    entries: tuple[AuditEntry, ...]  # newest first


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPage:
    tokens: tuple[TokenRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SecretValue:
    value: str
    shared: bool = False  # available to all users, not only the caller


@dataclass(frozen=True, kw_only=True, slots=True)
class SecretNames:
    own: tuple[str, ...]
    shared: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedJobSelection:
    """The jobs named, else all of the caller's that match; none that they were resumed or rerun
    from."""

    jobs: tuple[str, ...] = ()
    states: frozenset[JobState] = frozenset()  # end states; empty: any
    older_than: timedelta = timedelta(0)  # since they ended
    all_owners: bool = False  # not only the caller's jobs
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveRequest(EndedJobSelection):
    """Leave these jobs out of listings. Deletes nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnarchiveRequest:
    jobs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PurgeRequest(EndedJobSelection):
    """Delete the logs, results and code of these jobs."""

    checkpoints: bool = False  # delete checkpoints too


@dataclass(frozen=True, kw_only=True, slots=True)
class PurgedJob:
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
    more: bool = False  # other jobs match too; the next request selects them

    @property
    def size(self) -> int:
        """Bytes of everything that is deleted."""
        checkpoints = sum(row.checkpoint_size for row in self.jobs if row.with_checkpoints)
        return self.code_size + sum(row.size for row in self.jobs) + checkpoints


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSize:
    size: int  # bytes of this host's log on the server


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    host: int  # process number in the gang
    attempt: int
    line: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorDetail:
    """Why a request failed."""

    kind: str  # name of a class in `tpufleet.errors`
    message: str


# Header with the error, percent-encoded: a response to HEAD has no body.
ERROR_HEADER = "X-Tpufleet-Error"


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorResponse:
    error: ErrorDetail


@dataclass(frozen=True, kw_only=True, slots=True)
class NewLink:
    """A link to a file of a job that works without a token."""

    resource: str  # `logs` or `result`
    expires_in: timedelta


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedLink:
    path: str  # with its query; the server's address precedes it
    expires_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Acknowledgement:
    """The request succeeded; there is nothing to return."""

    done: bool = True
