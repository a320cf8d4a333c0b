"""What is written to a store, and what is asked of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, StrEnum
from typing import Protocol, TypeVar

from tpufleet.model.events import Event
from tpufleet.model.fleet.hosts import Host
from tpufleet.model.fleet.inventory import InventoryNote
from tpufleet.model.fleet.pools import CapacityRefusal, Pool
from tpufleet.model.fleet.reservations import Reservation
from tpufleet.model.fleet.slices import SliceId, TpuSlice
from tpufleet.model.inbox import InboxMessage
from tpufleet.model.job.attempts import Attempt
from tpufleet.model.job.checkpoint_locations import spelled
from tpufleet.model.job.job_edits import JobEdit
from tpufleet.model.job.job_search import JobSearch
from tpufleet.model.job.jobs import Job, JobId, JobState
from tpufleet.model.people.notifications import Delivery, NotificationSettings
from tpufleet.model.people.preferences import Preferences

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
    other_owner_than: str | None = None
    search: JobSearch | None = None
    archived: bool | None = False  # None: both
    having: FileKind | None = None  # of which they were not deleted
    oldest_first: bool = False  # not for a search
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
