"""The interface of a store, through which all processes communicate.

Writers are separate: the service inserts jobs, messages, users and pools; only the controller
changes jobs, attempts, slices and hosts, and it holds a lease to do so. So rows need no versions.
What users edit of a job is kept beside its row, and applied to whatever the controller writes.
Events are written in the same commit as the change they explain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, StrEnum
from typing import Protocol, TypeVar

from tpufleet.errors import Unreachable
from tpufleet.model.events import Event
from tpufleet.model.fleet.host_commands import HostCommandResult, SentHostCommand
from tpufleet.model.fleet.hosts import Host, HostId, HostLiveness
from tpufleet.model.fleet.inventory import InventoryNote
from tpufleet.model.fleet.pools import CapacityRefusal, Pool
from tpufleet.model.fleet.reservations import Reservation
from tpufleet.model.fleet.slices import SliceId, TpuSlice
from tpufleet.model.inbox import InboxMessage
from tpufleet.model.job.attempts import Attempt, AttemptId
from tpufleet.model.job.checkpoint_locations import spelled
from tpufleet.model.job.job_edits import JobEdit
from tpufleet.model.job.job_search import JobSearch
from tpufleet.model.job.jobs import Job, JobId, JobState
from tpufleet.model.job.metric_points import MetricPoint
from tpufleet.model.people.audit import AuditEntry
from tpufleet.model.people.notifications import Delivery, NotificationSettings
from tpufleet.model.people.preferences import Preferences
from tpufleet.model.people.users import Token, User

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right to act, until it expires. The token increases each time the holder changes."""

    name: str
    holder: str
    token: int
    expires_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeSet:
    """Everything that one commit writes, atomically."""

    new_jobs: Sequence[Job] = ()  # Conflict if an id is taken
    jobs: Sequence[Job] = ()  # earlier edits are kept
    edits: Sequence[JobEdit] = ()  # of jobs that exist; others are ignored
    attempts: Sequence[Attempt] = ()  # Conflict if it changes one that has ended
    slices: Sequence[TpuSlice] = ()
    hosts: Sequence[Host] = ()
    refusals: Sequence[CapacityRefusal] = ()
    pools: Sequence[Pool] = ()
    deleted_pools: Sequence[str] = ()
    messages: Sequence[InboxMessage] = ()  # into the inbox; the store numbers them
    consumed: Sequence[int] = ()  # inbox messages that this change handles
    events: Sequence[Event] = ()  # the store numbers them
    required_user: str = ""  # Conflict unless this user exists; empty: none

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)


class FileKind(StrEnum):
    """Files of a job whose deletion is recorded. `FILES`: logs, results and code."""

    FILES = "files"
    LOGS = "logs"
    CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobQuery:
    """Newest first. `before` is the id of the last job of the previous page. Archived jobs are
    left out by default."""

    owner: str | None = None
    states: frozenset[JobState] = frozenset()  # empty: all
    pool: str | None = None
    tag: str | None = None
    name: str | None = None
    parent: JobId | None = None
    ids: Sequence[JobId] | None = None  # a few hundred at most, as of `parents`
    parents: Sequence[JobId] | None = None
    snapshot: str | None = None
    other_owner_than: str | None = None
    search: JobSearch | None = None
    archived: bool | None = False  # None: both
    having: FileKind | None = None  # of which they were not deleted
    oldest_first: bool = False  # not for a search
    submitted_before: datetime | None = None
    limit: int = 100
    before: JobId | None = None


def code_reference(digest: str) -> str:
    """For `referring_jobs`."""
    return f"code/{digest}"


def checkpoint_reference(job_id: str) -> str:
    return f"checkpoint/{job_id}"


def location_reference(location: str) -> str:
    """Equal for spellings of one location; links on disk are not resolved."""
    return f"location/{hashlib.sha256(spelled(location).encode()).hexdigest()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EventQuery:
    """The first matching events; with `newest`, the last ones. Always oldest first."""

    after: int = 0
    job_id: JobId | None = None
    slice_id: SliceId | None = None
    pool: str | None = None
    by: str | None = None  # the user who caused them
    reservation: str | None = None
    limit: int = 500
    newest: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveState:
    """Everything that has not ended: what a controller loads when it takes over."""

    jobs: Sequence[Job] = ()
    attempts: Sequence[Attempt] = ()  # every attempt of those jobs, ended ones too
    slices: Sequence[TpuSlice] = ()  # those not gone
    hosts: Sequence[Host] = ()  # of those slices
    pools: Sequence[Pool] = ()
    refusals: Sequence[CapacityRefusal] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What was there in a span of time."""

    slices: Sequence[TpuSlice]  # oldest first
    attempts: Sequence[Attempt]  # oldest first

    @property
    def job_ids(self) -> list[JobId]:
        held = {each.job_id for each in self.slices if each.job_id is not None}
        return sorted(held | {attempt.job_id for attempt in self.attempts})


class StoreChange(Enum):
    """What a commit added, for those who wait for it."""

    MESSAGES = "messages"  # in the inbox
    EVENTS = "events"


class Subscription(Protocol):
    """Notifications of commits, also those of other servers."""

    @property
    def connected(self) -> bool:
        """While this is False, poll."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredObject:
    """Without its content."""

    name: str
    size: int
    at: datetime  # when it was written


# Objects that are stored as documents, and the name of each kind in the database.
DOCUMENT_KINDS: dict[type, str] = {
    Preferences: "preferences",
    Reservation: "reservation",
    InventoryNote: "inventory",
    NotificationSettings: "notifications",
    Delivery: "delivery",
}


class Store(Protocol):
    # Reading has no side effects.
    def job(self, job_id: JobId) -> Job | None: ...
    def find_jobs(self, jobs: Sequence[JobId]) -> dict[JobId, Job]:
        """Those that exist, in few queries."""
        ...

    def jobs(self, query: JobQuery) -> list[Job]: ...
    def jobs_like(self, prefix: str, limit: int = 10) -> list[Job]:
        """Jobs whose id or name starts with this, newest first."""
        ...

    def count_jobs(self) -> dict[JobState, int]: ...
    def referring_jobs(
        self, references: Sequence[str], *, with_files: bool = False
    ) -> dict[str, set[JobId]]:
        """The jobs that refer to code or checkpoints, by reference;
        `with_files`: without those whose files were deleted."""
        ...

    def referred(self, references: Sequence[str]) -> set[str]:
        """Those that some job refers to."""
        ...

    def files_deleted_at(self, job_id: JobId) -> datetime | None:
        """When its files were deleted; None if they were not."""
        ...

    def attempt(self, attempt_id: AttemptId) -> Attempt | None: ...
    def attempts(self, job_id: JobId) -> list[Attempt]:
        """By number."""
        ...

    def attempts_of(self, jobs: Sequence[JobId]) -> dict[JobId, list[Attempt]]:
        """Every attempt of each job that has any, by number, in few queries."""
        ...

    def live_attempts(self, jobs: Sequence[JobId]) -> dict[JobId, Attempt]:
        """The live attempt of each job that has one, in one query."""
        ...

    def newest_attempts(self, jobs: Sequence[JobId]) -> dict[JobId, Attempt]:
        """The last attempt of each job that has one, in one query."""
        ...

    def slice(self, slice_id: SliceId) -> TpuSlice | None: ...
    def slices(
        self, *, live_only: bool = True, pool: str | None = None, job_id: JobId | None = None
    ) -> list[TpuSlice]:
        """Oldest first. `live_only` excludes those that are GONE."""
        ...

    def first_slice_at(self) -> datetime | None:
        """When the first slice was requested."""
        ...

    def usage(self, since: datetime | None, until: datetime) -> Usage:
        """Slices and attempts that were requested or created by `until`, and not gone or ended
        before `since`."""
        ...

    def find_slices(self, slices: Sequence[SliceId]) -> dict[SliceId, TpuSlice]:
        """Those that exist, in one query."""
        ...

    def host(self, host_id: HostId) -> Host | None: ...
    def find_hosts(self, hosts: Sequence[HostId]) -> dict[HostId, Host]:
        """Those that exist, in one query."""
        ...

    def hosts(self, slice_id: SliceId) -> list[Host]:
        """By index."""
        ...

    def events(self, query: EventQuery) -> list[Event]: ...
    def last_event(self) -> int:
        """Number of the latest event; 0 when there is none."""
        ...

    def delete_events(self, before: datetime) -> int:
        """Delete events older than this, except those of live jobs. Returns how many."""
        ...

    def pools(self) -> list[Pool]: ...
    def pool(self, name: str) -> Pool | None: ...
    def refusals(self) -> list[CapacityRefusal]: ...
    def live(self) -> LiveState: ...
    def inbox(self, after: int = 0, limit: int = 10_000) -> list[InboxMessage]:
        """Messages not yet consumed, in order of arrival."""
        ...

    # The only write of jobs, attempts, slices and hosts.
    def commit(self, change: ChangeSet, *, fence: Lease | None = None) -> None:
        """Atomic. Conflict on a state transition that `model.lifecycle` does not allow; Fenced when
        the lease is no longer held with that token."""
        ...

    def subscribe(self, on_change: Callable[[StoreChange], None]) -> Subscription:
        """Calls `on_change`, in any thread, soon after a commit. It may be called for nothing."""
        ...

    # Marks of ended jobs. Their records are never deleted.
    def archive(self, jobs: Sequence[JobId]) -> None:
        """Leave them out of listings."""
        ...

    def unarchive(self, jobs: Sequence[JobId]) -> None: ...
    def mark_deleted(self, jobs: Sequence[JobId], kind: FileKind) -> None:
        """Logs or checkpoints alone; for all files see `mark_files_deleted`."""
        ...

    def mark_files_deleted(self, jobs: Sequence[JobId], at: datetime) -> None:
        """Also archives them. The first time is kept."""
        ...

    # Heartbeats: frequent, small, last write wins. `progress=None` keeps the earlier progress of
    # the same attempt; a new attempt id clears it.
    def record_heartbeats(self, reports: Sequence[HostLiveness]) -> None: ...
    def last_heartbeats(self, hosts: Sequence[HostId]) -> dict[HostId, HostLiveness]: ...
    def heartbeats_outside(self, start: datetime, end: datetime) -> dict[HostId, datetime]:
        """Hosts of slices that are not gone, last seen before `start` or after `end`."""
        ...

    def count_seen_hosts(self, since: datetime) -> int:
        """How many hosts were seen since."""
        ...

    def register_agent(self, host_id: HostId, digest: str) -> str:
        """The digest of the agent that registered first for this host."""
        ...

    def delete_heartbeats(self, hosts: Sequence[HostId]) -> None:
        """With the registrations: of hosts that are gone."""
        ...

    # Metrics. The last values of each job can be searched.
    def record_metrics(self, points: Sequence[MetricPoint]) -> None: ...
    def metric_points(self, job_id: JobId) -> list[MetricPoint]:
        """Oldest first."""
        ...

    def delete_metric_points(self, points: Sequence[MetricPoint]) -> None: ...

    # Small objects that users change as a whole, by type (see DOCUMENT_KINDS) and key.
    def document(self, kind: type[T], key: str) -> T | None: ...
    def documents(self, kind: type[T]) -> list[T]:
        """Ordered by key."""
        ...

    def update_document(
        self,
        kind: type[T],
        key: str,
        change: Callable[[T | None], T | None],
        *,
        fence: Lease | None = None,
        required_user: str = "",
    ) -> T | None:
        """Atomic: nothing else changes it between `change` and the write. None deletes it. Fenced
        when the lease is no longer held with that token; Conflict unless the user exists."""
        ...

    # Leases.
    def time(self) -> datetime | None:
        """By the database's clock, which all servers share; None when it has none of its own."""
        ...

    def acquire_lease(self, name: str, holder: str, ttl: timedelta, now: datetime) -> Lease | None:
        """Acquire or renew. None while another holder has it. Renewal keeps the token."""
        ...

    def release_lease(self, lease: Lease) -> None: ...

    # Host commands, shared by all servers.
    def put_host_command(self, sent: SentHostCommand) -> SentHostCommand:
        """Insert unless the id exists; returns the stored one."""
        ...

    def host_command(self, command_id: str) -> SentHostCommand | None: ...
    def host_commands(self) -> list[SentHostCommand]:
        """Oldest first."""
        ...

    def put_host_command_result(self, command_id: str, result: HostCommandResult) -> None:
        """The first result of a host is kept."""
        ...

    def host_command_results(
        self, command_ids: Sequence[str]
    ) -> dict[str, list[HostCommandResult]]:
        """By command id; results are ordered by host id."""
        ...

    def delete_host_commands(self, command_ids: Sequence[str]) -> None:
        """With their results."""
        ...

    # Users and tokens.
    def put_user(self, user: User) -> None: ...
    def user(self, name: str) -> User | None: ...
    def users(self) -> list[User]: ...
    def delete_user(self, name: str) -> None:
        """With all of their tokens. Once it returns, no write that requires the user succeeds, and
        what earlier ones wrote can be read."""
        ...

    def put_token(
        self, token: Token, *, check: Callable[[Sequence[Token]], None] | None = None
    ) -> None:
        """Conflict unless its user exists. `check` is called with the tokens of that user, to which
        none is added until the write; an error that it raises prevents the write."""
        ...

    def token_by_hash(self, digest: str) -> Token | None: ...
    def token_and_user(self, digest: str) -> tuple[Token, User | None] | None:
        """The token with this hash and whose it is. None: there is no such token."""
        ...

    def tokens(self, user: str | None = None) -> list[Token]: ...
    def update_token(self, token_id: str, change: Callable[[Token], Token]) -> Token | None:
        """Atomic: nothing else changes it between `change` and the write; an error of `change`
        leaves it as it is. None when it has been deleted."""
        ...

    def delete_token(self, token_id: str) -> None: ...

    # The audit log: entries are never changed or deleted.
    def append_audit(self, entry: AuditEntry) -> None:
        """The store numbers it."""
        ...

    def audit(
        self,
        *,
        actor: str | None = None,
        token: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[AuditEntry]:
        """Newest first; with numbers below `before`. Of a `token`: requests that were made with it
        or that changed it."""
        ...

    # Small objects that all servers share: the newest part of logs, encrypted secrets, and which
    # login links were used.
    def objects(self, prefix: str, since: str | None = None) -> list[StoredObject]:
        """By name. With `since`, only from the last one whose name is not after it."""
        ...

    def read_objects(self, names: Sequence[str]) -> dict[str, bytes]:
        """Those that exist."""
        ...

    def put_object(
        self,
        name: str,
        data: bytes,
        at: datetime,
        *,
        replace: bool = False,
        required_user: str = "",
        limit: tuple[str, int] | None = None,
    ) -> bool:
        """False when it exists, and is kept. Conflict unless the user exists.

        `limit` (prefix, count): False too when it is new and that many objects have the prefix.
        Exact among the writes that require the same user; others may exceed it at the same time."""
        ...

    def delete_objects(self, names: Sequence[str]) -> None:
        """Those that do not exist are ignored."""
        ...

    # Metadata of this installation (fleet id, fingerprint of the server secret).
    def metadata(self, name: str) -> str | None: ...
    def put_metadata(self, name: str, value: str, *, replace: bool = True) -> None:
        """Without `replace`, only if there is none of that name."""
        ...

    def write_error(self) -> Unreachable | None:
        """Why nothing can be recorded: the error of the last write, or a full disk; None: it can.
        Nothing is written to find out."""
        ...

    def close(self) -> None: ...
