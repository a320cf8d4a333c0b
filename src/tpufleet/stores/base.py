"""What a store is. Processes meet only here.

Writers are kept apart: the service inserts jobs, messages, users and pools; the controller alone
changes jobs, attempts, slices and hosts, and holds a lease to do so. So rows need no versions.
Events are written in the same commit as the change they explain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

from tpufleet.model.attempts import Attempt, AttemptId
from tpufleet.model.events import Event
from tpufleet.model.host_commands import HostCommandResult, SentHostCommand
from tpufleet.model.hosts import Host, HostId, HostLiveness
from tpufleet.model.inbox import InboxMessage
from tpufleet.model.jobs import Job, JobId, JobState
from tpufleet.model.pools import CapacityRefusal, Pool
from tpufleet.model.slices import SliceId, TpuSlice
from tpufleet.model.users import Token, User


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right to act, until it expires. The token grows each time the holder changes."""

    name: str
    holder: str
    token: int
    expires_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeSet:
    """Everything one commit writes. All of it, or nothing."""

    new_jobs: Sequence[Job] = ()  # Conflict if an id is taken
    jobs: Sequence[Job] = ()
    attempts: Sequence[Attempt] = ()  # Conflict if it would change one that has ended
    slices: Sequence[TpuSlice] = ()
    hosts: Sequence[Host] = ()
    refusals: Sequence[CapacityRefusal] = ()
    pools: Sequence[Pool] = ()
    deleted_pools: Sequence[str] = ()
    messages: Sequence[InboxMessage] = ()  # into the inbox; the store numbers them
    consumed: Sequence[int] = ()  # inbox messages that this change answers
    events: Sequence[Event] = ()  # the store numbers them

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobQuery:
    """Newest first. `before` is the id of the last job of the page before. Jobs that were cleaned
    away are left out, or asked for: never both."""

    owner: str | None = None
    states: frozenset[JobState] = frozenset()  # empty: all
    pool: str | None = None
    tag: str | None = None
    name: str | None = None
    parent: JobId | None = None
    cleaned: bool = False
    limit: int = 100
    before: JobId | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EventQuery:
    """Oldest first, unless `newest` asks for the last ones (still returned oldest first)."""

    after: int = 0
    job_id: JobId | None = None
    slice_id: SliceId | None = None
    limit: int = 500
    newest: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveState:
    """All that has not ended: what a controller loads when it takes over."""

    jobs: Sequence[Job] = ()
    attempts: Sequence[Attempt] = ()  # every attempt of those jobs, ended ones too
    slices: Sequence[TpuSlice] = ()  # those not gone
    hosts: Sequence[Host] = ()  # of those slices
    pools: Sequence[Pool] = ()
    refusals: Sequence[CapacityRefusal] = ()


class Store(Protocol):
    # Reading changes nothing.
    def job(self, job_id: JobId) -> Job | None: ...
    def jobs(self, query: JobQuery) -> list[Job]: ...
    def jobs_like(self, prefix: str, limit: int = 10) -> list[Job]:
        """Jobs whose id or name starts with this, newest first."""
        ...

    def count_jobs(self) -> dict[JobState, int]: ...
    def cleaned_at(self, job_id: JobId) -> datetime | None:
        """When it was cleaned away."""
        ...

    def attempt(self, attempt_id: AttemptId) -> Attempt | None: ...
    def attempts(self, job_id: JobId) -> list[Attempt]:
        """By number."""
        ...

    def newest_attempts(self, jobs: Sequence[JobId]) -> dict[JobId, Attempt]:
        """The last attempt of each job that has one; one query however many jobs."""
        ...

    def slice(self, slice_id: SliceId) -> TpuSlice | None: ...
    def slices(
        self, *, live_only: bool = True, pool: str | None = None, job_id: JobId | None = None
    ) -> list[TpuSlice]:
        """`live_only` leaves out those that are GONE. Oldest first."""
        ...

    def host(self, host_id: HostId) -> Host | None: ...
    def hosts(self, slice_id: SliceId) -> list[Host]:
        """By index."""
        ...

    def events(self, query: EventQuery) -> list[Event]: ...
    def last_event(self) -> int:
        """Number of the newest event; 0 when there is none."""
        ...

    def pools(self) -> list[Pool]: ...
    def pool(self, name: str) -> Pool | None: ...
    def refusals(self) -> list[CapacityRefusal]: ...
    def live(self) -> LiveState: ...
    def inbox(self, after: int = 0, limit: int = 10_000) -> list[InboxMessage]:
        """Messages not yet consumed, in order of arrival."""
        ...

    # The one write for jobs and what belongs to them.
    def commit(self, change: ChangeSet, *, fence: Lease | None = None) -> None:
        """Apply all of it or nothing. Fenced when the lease is no longer held with that token."""
        ...

    def clean(self, jobs: Sequence[JobId], at: datetime) -> None:
        """From now on these, which have ended, count as cleaned away. The first time stays."""
        ...

    # Signs of life: frequent, small, last write wins. `progress=None` keeps the older progress of
    # the same attempt; a new attempt id forgets it.
    def record_liveness(self, pulses: Sequence[HostLiveness]) -> None: ...
    def host_liveness(self, hosts: Sequence[HostId]) -> dict[HostId, HostLiveness]: ...
    def silent_hosts(self, since: datetime) -> list[HostId]:
        """Hosts of slices that are not gone, whose last pulse is older than this."""
        ...

    def count_seen_hosts(self, since: datetime) -> int:
        """How many hosts were seen since then."""
        ...

    def bind_agent(self, host_id: HostId, digest: str) -> str:
        """Who speaks for this host: the first that entered, for ever."""
        ...

    def delete_liveness(self, hosts: Sequence[HostId]) -> None:
        """Signs of life of hosts that are gone, and who spoke for them."""
        ...

    # Leases.
    def acquire_lease(self, name: str, holder: str, ttl: timedelta, now: datetime) -> Lease | None:
        """Take or renew. None while somebody else holds it. Renewal keeps the token."""
        ...

    def release_lease(self, lease: Lease) -> None: ...

    # Errands, so that whichever server an agent or a person talks to knows them.
    def put_host_command(self, sent: SentHostCommand) -> SentHostCommand:
        """What is now under its id: an earlier one stays."""
        ...

    def host_command(self, errand_id: str) -> SentHostCommand | None: ...
    def host_commands(self) -> list[SentHostCommand]:
        """Oldest first."""
        ...

    def put_host_command_result(self, errand_id: str, result: HostCommandResult) -> None:
        """The first answer of a host stays."""
        ...

    def host_command_results(self, errands: Sequence[str]) -> dict[str, list[HostCommandResult]]:
        """By errand, those of each in order of their hosts' ids."""
        ...

    def delete_host_commands(self, errands: Sequence[str]) -> None:
        """And their results."""
        ...

    # People.
    def put_user(self, user: User) -> None: ...
    def user(self, name: str) -> User | None: ...
    def users(self) -> list[User]: ...
    def delete_user(self, name: str) -> None:
        """And all of their tokens."""
        ...

    def put_token(self, token: Token) -> None: ...
    def token_by_hash(self, digest: str) -> Token | None: ...
    def tokens(self, user: str | None = None) -> list[Token]: ...
    def refresh_token(self, token: Token) -> None:
        """Replace a token, unless it has been dropped meanwhile."""
        ...

    def delete_token(self, token_id: str) -> None: ...

    # Small facts about this installation (fleet id, fingerprint of the server secret).
    def metadata(self, name: str) -> str | None: ...
    def put_metadata(self, name: str, value: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """One page of jobs, and where the next one starts."""

    jobs: list[Job] = field(default_factory=list)
    next: JobId | None = None
