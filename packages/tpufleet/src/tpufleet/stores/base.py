"""The store, through which all processes communicate: one set of statements for every database.

Writers are separate: the service inserts jobs, messages, users and pools; only the controller
changes jobs, attempts, slices and hosts, and it holds a lease to do so. So rows need no versions.
What users edit of a job is kept beside its row, and applied to whatever the controller writes.
Events are written in the same commit as the change they explain.

Commits are in `sql_commit`, SELECTs with several filters in `sql_queries`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TypeVar

from tpufleet.errors import Unreachable
from tpufleet.model.events import Event
from tpufleet.model.fleet.host_commands import HostCommandResult, SentHostCommand
from tpufleet.model.fleet.hosts import Host, HostId, HostLiveness
from tpufleet.model.fleet.pools import CapacityRefusal, Pool
from tpufleet.model.fleet.slices import SliceId, TpuSlice
from tpufleet.model.inbox import InboxMessage
from tpufleet.model.job.attempts import Attempt, AttemptId
from tpufleet.model.job.job_search import MetricTerm
from tpufleet.model.job.jobs import ENDED_STATES, Job, JobId, JobState
from tpufleet.model.job.metric_points import MetricPoint
from tpufleet.model.people.audit import AuditEntry
from tpufleet.model.people.users import Token, User
from tpufleet.model.values.encoding import from_json
from tpufleet.stores import invariants
from tpufleet.stores.records import (
    DOCUMENT_KINDS,
    ChangeSet,
    EventQuery,
    FileKind,
    JobQuery,
    Lease,
    LiveState,
    StoreChange,
    StoredObject,
    Subscription,
    Usage,
    checkpoint_reference,
    code_reference,
    location_reference,
)
from tpufleet.stores.sql import (
    job_references,
    schema_migrations,
    sql_commit,
    sql_edits,
    sql_queries,
    sql_rows,
    sql_search,
)
from tpufleet.stores.sql.database import Database, DatabaseSession, Row

__all__ = [
    "DOCUMENT_KINDS", "ChangeSet", "EventQuery", "FileKind", "JobQuery", "Lease", "LiveState",
    "Store", "StoreChange", "StoredObject", "Subscription", "Usage", "checkpoint_reference",
    "code_reference", "location_reference",
]  # fmt: skip
T = TypeVar("T")

_EVENTS_PER_DELETE = 10_000
_MAX_JOINED = 20_000  # jobs, apart from live ones: a text has at most 1 GB

_UPSERT_HEARTBEATS = """
INSERT INTO heartbeats (host_id, seen_at, attempt_id, progress) {rows}
ON CONFLICT (host_id) DO UPDATE SET
    seen_at = excluded.seen_at,
    progress = CASE WHEN excluded.progress IS NULL AND (
            excluded.attempt_id = heartbeats.attempt_id
            OR (excluded.attempt_id IS NULL AND heartbeats.attempt_id IS NULL))
        THEN heartbeats.progress ELSE excluded.progress END,
    attempt_id = excluded.attempt_id
"""
_TOKENS_OF_USER = "SELECT data FROM tokens WHERE owner = ? ORDER BY created_at, id"
_LIVE = {
    Job: "SELECT data FROM jobs WHERE ended = 0 ORDER BY submitted_at, id",
    Attempt: "SELECT data FROM attempts WHERE job_id IN (SELECT id FROM jobs WHERE ended = 0) "
    "ORDER BY job_id, number",
    TpuSlice: "SELECT data FROM slices WHERE gone = 0 ORDER BY requested_at, id",
    Host: "SELECT data FROM hosts WHERE slice_id IN (SELECT id FROM slices WHERE gone = 0) "
    "ORDER BY slice_id, host_index",
    Pool: "SELECT data FROM pools ORDER BY name",
    CapacityRefusal: "SELECT data FROM capacity_refusals ORDER BY id",
}


class Store:
    def __init__(self, database: Database) -> None:
        self._database = database
        schema_migrations.migrate(database)
        self._decode_jobs = sql_rows.CachingDecoder(Job)
        self._decode_attempts = sql_rows.CachingDecoder(Attempt)

    # Jobs and attempts.

    def job(self, job_id: JobId) -> Job | None:
        return self._one(Job, "SELECT data FROM jobs WHERE id = ?", job_id)

    def find_jobs(self, jobs: Sequence[JobId]) -> dict[JobId, Job]:
        """Those that exist, in few queries."""
        rows = self._joined_in_batches("SELECT data FROM jobs WHERE id IN ({keys})", jobs)
        return {each.id: each for each in self._decode_jobs(rows)}

    def jobs(self, query: JobQuery) -> list[Job]:
        last = None if query.before is None else self.job(query.before)
        if last is None and query.before is not None:
            return []
        terms = query.search.terms if query.search is not None else ()
        large = [
            term for term in terms if isinstance(term, MetricTerm) and self._is_large_set(term)
        ]
        if terms:
            rows = self._database.read(
                lambda session: sql_search.select(session, self._database, query, last, large)
            )
            return self._decode_jobs(rows)
        statement, values = sql_queries.select_jobs(query, last)
        few = query.limit <= _MAX_JOINED or (query.states and not query.states & ENDED_STATES)
        return self._decode_jobs((self._data if few else self._rows)(statement, *values))

    def _is_large_set(self, term: MetricTerm) -> bool:
        condition, values = sql_edits.metric_condition(term)
        statement = sql_edits.METRIC_SET_SIZE.format(condition=condition)
        return self._rows(statement, *values)[0][0] >= sql_edits.MAX_METRIC_SET

    def jobs_like(self, prefix: str, limit: int = 10) -> list[Job]:
        """Jobs whose id or name starts with this, newest first."""
        statement, values = sql_queries.select_jobs_like(prefix, limit)
        return self._decode_jobs(self._rows(statement, *values))

    def count_jobs(self) -> dict[JobState, int]:
        rows = self._rows(
            "SELECT state, COUNT(*) FROM jobs WHERE ended = 0 GROUP BY state "
            "UNION ALL SELECT state, count FROM job_counts WHERE count > 0"
        )
        return {JobState(state): count for state, count in rows}

    def referring_jobs(
        self, references: Sequence[str], *, with_files: bool = False
    ) -> dict[str, set[JobId]]:
        """The jobs that refer to code or checkpoints, by reference;
        `with_files`: without those whose files were deleted."""
        found = self._database.read(
            lambda session: job_references.referring(session, references, with_files=with_files)
        )
        return {each: {JobId(job_id) for job_id in jobs} for each, jobs in found.items()}

    def referred(self, references: Sequence[str]) -> set[str]:
        """Those that some job refers to."""
        return self._database.read(lambda session: job_references.referred(session, references))

    def files_deleted_at(self, job_id: JobId) -> datetime | None:
        """When its files were deleted; None if they were not."""
        for (at,) in self._rows("SELECT files_deleted_at FROM jobs WHERE id = ?", job_id):
            return None if at is None else sql_rows.from_micros(at)
        return None

    def archive(self, jobs: Sequence[JobId]) -> None:
        """Leave them out of listings."""
        self._update_jobs("archived = 1", jobs)

    def unarchive(self, jobs: Sequence[JobId]) -> None:
        self._update_jobs("archived = 0", jobs)

    def mark_deleted(self, jobs: Sequence[JobId], kind: FileKind) -> None:
        """Logs or checkpoints alone; for all files see `mark_files_deleted`."""
        self._update_jobs(f"{kind.value}_deleted = 1", jobs)

    def mark_files_deleted(self, jobs: Sequence[JobId], at: datetime) -> None:
        """Also archives them. The first time is kept."""
        self._update_jobs(
            "archived = 1, files_deleted = 1, logs_deleted = 1, "
            "files_deleted_at = COALESCE(files_deleted_at, ?)",
            jobs,
            sql_rows.to_micros(at),
        )

    def _update_jobs(self, assignments: str, jobs: Sequence[JobId], *values: object) -> None:
        # Ordered, so that two servers that write at once cannot deadlock.
        self._write_each(
            f"UPDATE jobs SET {assignments} WHERE id = ?",
            [(*values, job_id) for job_id in sorted(jobs)],
        )

    def attempt(self, attempt_id: AttemptId) -> Attempt | None:
        return self._one(Attempt, "SELECT data FROM attempts WHERE id = ?", attempt_id)

    def attempts(self, job_id: JobId) -> list[Attempt]:
        """By number."""
        return self._all(
            Attempt, "SELECT data FROM attempts WHERE job_id = ? ORDER BY number", job_id
        )

    def attempts_of(self, jobs: Sequence[JobId]) -> dict[JobId, list[Attempt]]:
        """Every attempt of each job that has any, by number, in few queries."""
        rows = self._joined_in_batches("SELECT data FROM attempts WHERE job_id IN ({keys})", jobs)
        found: dict[JobId, list[Attempt]] = {}
        for attempt in sorted(self._decode_attempts(rows), key=lambda each: each.number):
            found.setdefault(attempt.job_id, []).append(attempt)
        return found

    def live_attempts(self, jobs: Sequence[JobId]) -> dict[JobId, Attempt]:
        """The live attempt of each job that has one, in one query."""
        rows = self._joined_in_batches(
            "SELECT data FROM attempts WHERE job_id IN ({keys}) AND ended = 0", jobs
        )
        return {each.job_id: each for each in self._decode_attempts(rows)}

    def newest_attempts(self, jobs: Sequence[JobId]) -> dict[JobId, Attempt]:
        """The last attempt of each job that has one, in one query."""
        rows = self._joined_in_batches(
            "SELECT data FROM attempts AS newest WHERE job_id IN ({keys}) AND number = "
            "(SELECT MAX(number) FROM attempts WHERE job_id = newest.job_id)",
            jobs,
        )
        return {attempt.job_id: attempt for attempt in self._decode_attempts(rows)}

    # Slices and hosts.

    def slice(self, slice_id: SliceId) -> TpuSlice | None:
        return self._one(TpuSlice, "SELECT data FROM slices WHERE id = ?", slice_id)

    def slices(
        self, *, live_only: bool = True, pool: str | None = None, job_id: JobId | None = None
    ) -> list[TpuSlice]:
        """Oldest first. `live_only` excludes those that are GONE."""
        statement, values = sql_queries.select_slices(live_only, pool, job_id)
        return self._all(TpuSlice, statement, *values)

    def first_slice_at(self) -> datetime | None:
        """When the first slice was requested."""
        first = self._rows("SELECT MIN(requested_at) FROM slices")[0][0]
        return None if first is None else sql_rows.from_micros(first)

    def usage(self, since: datetime | None, until: datetime) -> Usage:
        """Slices and attempts that were requested or created by `until`, and not gone or ended
        before `since`."""
        span = (0 if since is None else sql_rows.to_micros(since), sql_rows.to_micros(until))
        return Usage(
            slices=self._all(TpuSlice, sql_queries.SLICES_BETWEEN, *span),
            attempts=self._all(Attempt, sql_queries.ATTEMPTS_BETWEEN, *span),
        )

    def find_slices(self, slices: Sequence[SliceId]) -> dict[SliceId, TpuSlice]:
        """Those that exist, in one query."""
        rows = self._joined_in_batches("SELECT data FROM slices WHERE id IN ({keys})", slices)
        return {each.id: each for each in sql_rows.decode_all(rows, TpuSlice)}

    def host(self, host_id: HostId) -> Host | None:
        return self._one(Host, "SELECT data FROM hosts WHERE id = ?", host_id)

    def find_hosts(self, hosts: Sequence[HostId]) -> dict[HostId, Host]:
        """Those that exist, in one query."""
        rows = self._joined_in_batches("SELECT data FROM hosts WHERE id IN ({keys})", hosts)
        return {each.id: each for each in sql_rows.decode_all(rows, Host)}

    def hosts(self, slice_id: SliceId) -> list[Host]:
        """By index."""
        return self._all(
            Host, "SELECT data FROM hosts WHERE slice_id = ? ORDER BY host_index", slice_id
        )

    # Events and messages.

    def events(self, query: EventQuery) -> list[Event]:
        statement, values = sql_queries.select_events(query)
        events = self._all(Event, statement, *values)
        return events[::-1] if query.newest else events

    def last_event(self) -> int:
        """Number of the latest event; 0 when there is none."""
        return self._rows("SELECT events FROM sequences WHERE id = 1")[0][0]

    def delete_events(self, before: datetime) -> int:
        """Older than this, except those of live jobs, in steps, so that no statement takes long.
        Returns how many."""
        end, deleted = self._first_event_since(before), 0
        first = self._rows("SELECT COALESCE(MIN(seq), 0) FROM events")[0][0]
        selected = (
            "FROM events WHERE seq >= ? AND seq < ? AND (job_id IS NULL OR job_id NOT IN "
            "(SELECT id FROM jobs WHERE ended = 0))"
        )
        for start in range(first, end, _EVENTS_PER_DELETE):
            bounds = (start, min(start + _EVENTS_PER_DELETE, end))
            count = self._rows(f"SELECT COUNT(*) {selected}", *bounds)[0][0]
            if count:
                self._write(f"DELETE {selected}", *bounds)
            deleted += count
        return deleted

    def _first_event_since(self, moment: datetime) -> int:
        """By bisection: events are numbered in the order of their times, apart from clock steps."""
        low, high = 0, self.last_event() + 1
        while low < high:
            middle = (low + high) // 2
            following = self._all(
                Event, "SELECT data FROM events WHERE seq >= ? ORDER BY seq LIMIT 1", middle
            )
            if following and following[0].at < moment:
                low = following[0].seq + 1
            else:
                high = middle
        return low

    def inbox(self, after: int = 0, limit: int = 10_000) -> list[InboxMessage]:
        """Messages not yet consumed, in order of arrival."""
        return self._all(
            InboxMessage, "SELECT data FROM inbox WHERE seq > ? ORDER BY seq LIMIT ?", after, limit
        )

    # Pools, and the live state.

    def pools(self) -> list[Pool]:
        return self._all(Pool, _LIVE[Pool])

    def pool(self, name: str) -> Pool | None:
        return self._one(Pool, "SELECT data FROM pools WHERE name = ?", name)

    def refusals(self) -> list[CapacityRefusal]:
        return self._all(CapacityRefusal, _LIVE[CapacityRefusal])

    def live(self) -> LiveState:
        rows = self._database.snapshot(
            lambda session: {
                kind: sql_rows.split(session.rows(self._join(statement)))
                for kind, statement in _LIVE.items()
            }
        )
        return LiveState(
            jobs=self._decode_jobs(rows[Job]),
            attempts=self._decode_attempts(rows[Attempt]),
            slices=sql_rows.decode_all(rows[TpuSlice], TpuSlice),
            hosts=sql_rows.decode_all(rows[Host], Host),
            pools=sql_rows.decode_all(rows[Pool], Pool),
            refusals=sql_rows.decode_all(rows[CapacityRefusal], CapacityRefusal),
        )

    def commit(self, change: ChangeSet, *, fence: Lease | None = None) -> None:
        """Atomic. Conflict on a state transition that `model.lifecycle` does not allow; Fenced when
        the lease is no longer held with that token."""
        self._database.write(
            lambda session: sql_commit.apply_change_set(session, change, fence, self._database)
        )

    def subscribe(self, on_change: Callable[[StoreChange], None]) -> Subscription:
        """Calls `on_change`, in any thread, soon after a commit. It may be called for nothing."""
        return self._database.listen(on_change)

    # Heartbeats: frequent, small, last write wins. `progress=None` keeps the earlier progress of
    # the same attempt; a new attempt id clears it.

    def record_heartbeats(self, reports: Sequence[HostLiveness]) -> None:
        # Ordered by host, so that two servers that write at once cannot deadlock.
        rounds: list[dict[HostId, Row]] = []  # one statement changes a row once
        for report in sorted(reports, key=lambda report: report.host_id):
            rows = next((each for each in rounds if report.host_id not in each), None)
            if rows is None:
                rounds.append(rows := {})
            rows[report.host_id] = sql_rows.heartbeat_row(report)
        statement = _UPSERT_HEARTBEATS.format(rows=self._database.heartbeat_rows)
        size = self._database.background_batch
        for rows in rounds:
            values = list(rows.values())
            for start in range(0, len(values), size):
                text = sql_rows.to_text(values[start : start + size])
                self._database.write(
                    lambda session, text=text: session.run(statement, text),  # type: ignore[misc]
                    durable=False,
                )

    def last_heartbeats(self, hosts: Sequence[HostId]) -> dict[HostId, HostLiveness]:
        columns = ("host_id", "seen_at", "COALESCE(attempt_id, '')", "COALESCE(progress, '')")
        statement = (
            f"SELECT {self._units(columns)} AS data FROM heartbeats WHERE host_id IN ({{keys}})"
        )
        rows = self._joined_in_batches(statement, hosts)
        found = (sql_rows.heartbeat_from_text(text) for (text,) in rows)
        return {each.host_id: each for each in found}

    def heartbeats_outside(self, start: datetime, end: datetime) -> dict[HostId, datetime]:
        """Hosts of slices that are not gone, last seen before `start` or after `end`."""
        columns = self._units(("heartbeats.host_id", "heartbeats.seen_at"))
        statement = (
            f"SELECT {columns} AS data FROM heartbeats "
            "JOIN hosts ON hosts.id = heartbeats.host_id JOIN slices ON slices.id = hosts.slice_id "
            "WHERE (heartbeats.seen_at < ? OR heartbeats.seen_at > ?) AND slices.gone = 0"
        )
        rows = self._data(statement, sql_rows.to_micros(start), sql_rows.to_micros(end))
        pairs = (sql_rows.units(text) for (text,) in rows)
        return {HostId(host): sql_rows.from_micros(int(seen_at)) for host, seen_at in pairs}

    def count_seen_hosts(self, since: datetime) -> int:
        """How many hosts were seen since."""
        statement = "SELECT COUNT(*) FROM heartbeats WHERE seen_at >= ?"
        return self._rows(statement, sql_rows.to_micros(since))[0][0]

    def register_agent(self, host_id: HostId, digest: str) -> str:
        """The digest of the agent that registered first for this host."""

        def work(session: DatabaseSession) -> str:
            session.run(
                "INSERT INTO registrations (host_id, digest) VALUES (?, ?) ON CONFLICT DO NOTHING",
                host_id,
                digest,
            )
            return session.rows("SELECT digest FROM registrations WHERE host_id = ?", host_id)[0][0]

        return self._database.write(work)

    def delete_heartbeats(self, hosts: Sequence[HostId]) -> None:
        """With the registrations: of hosts that are gone."""
        keys = [(host_id,) for host_id in sorted(hosts)]
        self._write_each("DELETE FROM heartbeats WHERE host_id = ?", keys)
        self._write_each("DELETE FROM registrations WHERE host_id = ?", keys)

    # Metrics.

    def record_metrics(self, points: Sequence[MetricPoint]) -> None:
        size = self._database.background_batch
        for start in range(0, len(points), size):
            batch = points[start : start + size]
            self._database.write(
                lambda session, batch=batch: sql_edits.write_points(session, batch),  # type: ignore[misc]
                durable=False,
            )

    def metric_points(self, job_id: JobId) -> list[MetricPoint]:
        """Oldest first."""
        return self._all(
            MetricPoint, "SELECT data FROM metric_points WHERE job_id = ? ORDER BY at", job_id
        )

    def delete_metric_points(self, points: Sequence[MetricPoint]) -> None:
        self._write_each(
            "DELETE FROM metric_points WHERE job_id = ? AND at = ?",
            [(point.job_id, sql_rows.to_micros(point.at)) for point in points],
        )

    # Documents: small objects that users change as a whole, by type (see DOCUMENT_KINDS) and key.

    def document(self, kind: type[T], key: str) -> T | None:
        statement = "SELECT data FROM documents WHERE kind = ? AND id = ?"
        return self._one(kind, statement, DOCUMENT_KINDS[kind], key)

    def documents(self, kind: type[T]) -> list[T]:
        """Ordered by key."""
        statement = "SELECT data FROM documents WHERE kind = ? ORDER BY id"
        return self._all(kind, statement, DOCUMENT_KINDS[kind])

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

        def work(session: DatabaseSession) -> T | None:
            if fence is not None:
                sql_commit.check_fence(session, fence, self._database.for_update)
            # Locks, also where there is no row yet.
            session.rows(f"SELECT id FROM sequences WHERE id = 1{self._database.for_update}")
            self._require_user(session, required_user)
            where = (DOCUMENT_KINDS[kind], key)
            rows = session.rows("SELECT data FROM documents WHERE kind = ? AND id = ?", *where)
            changed = change(sql_rows.decode_first(rows, kind))
            session.run("DELETE FROM documents WHERE kind = ? AND id = ?", *where)
            if changed is not None:
                statement = "INSERT INTO documents (kind, id, data) VALUES (?, ?, ?)"
                session.run(statement, *where, sql_rows.to_text(changed))
            return changed

        return self._database.write(work)

    # Leases.

    def time(self) -> datetime | None:
        """By the database's clock, which all servers share; None when it has none of its own."""
        if not self._database.time_in_micros:
            return None
        return sql_rows.from_micros(self._rows(self._database.time_in_micros)[0][0])

    def acquire_lease(self, name: str, holder: str, ttl: timedelta, now: datetime) -> Lease | None:
        """Acquire or renew. None while another holder has it. Renewal keeps the token."""

        def work(session: DatabaseSession) -> Lease | None:
            session.run(
                "INSERT INTO leases (name, holder, token, expires_at) VALUES (?, NULL, 0, 0) "
                "ON CONFLICT DO NOTHING",
                name,
            )
            before, token, expires_at = session.rows(
                "SELECT holder, token, expires_at FROM leases WHERE name = ?"
                + self._database.for_update,
                name,
            )[0]
            if before not in (None, holder) and sql_rows.to_micros(now) < expires_at:
                return None
            token = token if before == holder else token + 1
            session.run(
                "UPDATE leases SET holder = ?, token = ?, expires_at = ? WHERE name = ?",
                holder,
                token,
                sql_rows.to_micros(now + ttl),
                name,
            )
            return Lease(name=name, holder=holder, token=token, expires_at=now + ttl)

        return self._database.write(work)

    def release_lease(self, lease: Lease) -> None:
        self._write(
            "UPDATE leases SET holder = NULL WHERE name = ? AND holder = ? AND token = ?",
            lease.name,
            lease.holder,
            lease.token,
        )

    # Host commands.

    def put_host_command(self, sent: SentHostCommand) -> SentHostCommand:
        """Insert unless the id exists; returns the stored one."""

        def work(session: DatabaseSession) -> SentHostCommand:
            session.run(
                "INSERT INTO host_commands (id, sent_at, data) VALUES (?, ?, ?) "
                "ON CONFLICT DO NOTHING",
                sent.host_command.id,
                sql_rows.to_micros(sent.sent_at),
                sql_rows.to_text(sent),
            )
            rows = session.rows("SELECT data FROM host_commands WHERE id = ?", sent.host_command.id)
            return sql_rows.decode_all(rows, SentHostCommand)[0]

        return self._database.write(work)

    def host_command(self, command_id: str) -> SentHostCommand | None:
        return self._one(SentHostCommand, "SELECT data FROM host_commands WHERE id = ?", command_id)

    def host_commands(self) -> list[SentHostCommand]:
        """Oldest first."""
        return self._all(SentHostCommand, "SELECT data FROM host_commands ORDER BY sent_at, id")

    def put_host_command_result(self, command_id: str, result: HostCommandResult) -> None:
        """The first result of a host is kept."""
        self._write(
            "INSERT INTO host_command_results (command_id, host_id, data) VALUES (?, ?, ?) "
            "ON CONFLICT DO NOTHING",
            command_id,
            result.host_id,
            sql_rows.to_text(result),
        )

    def host_command_results(
        self, command_ids: Sequence[str]
    ) -> dict[str, list[HostCommandResult]]:
        """By command id; results are ordered by host id."""
        statement = (
            "SELECT command_id, data FROM host_command_results WHERE command_id IN ({keys}) "
            "ORDER BY command_id, host_id"
        )
        results: dict[str, list[HostCommandResult]] = {}
        for command_id, data in self._rows_in_batches(statement, command_ids):
            results.setdefault(command_id, []).extend(
                sql_rows.decode_all([(data,)], HostCommandResult)
            )
        return results

    def delete_host_commands(self, command_ids: Sequence[str]) -> None:
        """With their results."""
        keys = [(command_id,) for command_id in sorted(command_ids)]
        self._write_each("DELETE FROM host_commands WHERE id = ?", keys)
        self._write_each("DELETE FROM host_command_results WHERE command_id = ?", keys)

    # Users, tokens and metadata.

    def put_user(self, user: User) -> None:
        self._write(sql_commit.upsert("users", "name", "data"), user.name, sql_rows.to_text(user))

    def user(self, name: str) -> User | None:
        return self._one(User, "SELECT data FROM users WHERE name = ?", name)

    def users(self) -> list[User]:
        return self._all(User, "SELECT data FROM users ORDER BY name")

    def delete_user(self, name: str) -> None:
        """With all of their tokens. Once it returns, no write that requires the user succeeds, and
        what earlier ones wrote can be read."""

        def work(session: DatabaseSession) -> None:
            # Waits for commits under way, which may require the user: see `apply_change_set`.
            session.run("UPDATE sequences SET events = events WHERE id = 1")
            session.run("DELETE FROM users WHERE name = ?", name)
            session.run("DELETE FROM tokens WHERE owner = ?", name)

        self._database.write(work)

    def put_token(
        self, token: Token, *, check: Callable[[Sequence[Token]], None] | None = None
    ) -> None:
        """Conflict unless its user exists. `check` is called with the tokens of that user, to which
        none is added until the write; an error that it raises prevents the write."""
        statement = sql_commit.upsert("tokens", "id", "owner", "hash", "created_at", "data")

        def work(session: DatabaseSession) -> None:
            self._require_user(session, token.user)  # locks, so that others wait before `check`
            if check is not None:
                check(sql_rows.decode_all(session.rows(_TOKENS_OF_USER, token.user), Token))
            session.run(statement, *sql_rows.token_row(token))

        self._database.write(work)

    def token_by_hash(self, digest: str) -> Token | None:
        return self._one(Token, "SELECT data FROM tokens WHERE hash = ?", digest)

    def token_and_user(self, digest: str) -> tuple[Token, User | None] | None:
        """The token with this hash and whose it is. None: there is no such token."""
        statement = (
            "SELECT tokens.data, users.data FROM tokens "
            "LEFT JOIN users ON users.name = tokens.owner WHERE tokens.hash = ?"
        )
        for token, user in self._rows(statement, digest):
            known = None if user is None else from_json(user, User)
            return from_json(token, Token), known
        return None

    def tokens(self, user: str | None = None) -> list[Token]:
        if user is None:
            return self._all(Token, "SELECT data FROM tokens ORDER BY created_at, id")
        return self._all(Token, _TOKENS_OF_USER, user)

    def update_token(self, token_id: str, change: Callable[[Token], Token]) -> Token | None:
        """Atomic: nothing else changes it between `change` and the write; an error of `change`
        leaves it as it is. None when it has been deleted."""

        def work(session: DatabaseSession) -> Token | None:
            select = f"SELECT data FROM tokens WHERE id = ?{self._database.for_update}"
            before = sql_rows.decode_first(session.rows(select, token_id), Token)
            if before is None:
                return None
            changed = change(before)
            text = sql_rows.to_text(changed)
            session.run("UPDATE tokens SET data = ? WHERE id = ?", text, token_id)
            return changed

        return self._database.write(work)

    def delete_token(self, token_id: str) -> None:
        self._write("DELETE FROM tokens WHERE id = ?", token_id)

    def append_audit(self, entry: AuditEntry) -> None:
        """The store numbers it."""

        def work(session: DatabaseSession) -> None:
            session.run("UPDATE sequences SET audit = audit + 1 WHERE id = 1")
            seq = session.rows("SELECT audit FROM sequences WHERE id = 1")[0][0]
            session.run(
                "INSERT INTO audit (seq, at, actor, token_id, target, data) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                seq,
                sql_rows.to_micros(entry.at),
                entry.actor,
                entry.token_id,
                entry.target,
                sql_rows.to_text(replace(entry, seq=seq)),
            )

        self._database.write(work)

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
        filters, values = ["1 = 1"], list[object]()
        if actor is not None:
            filters.append("actor = ?")
            values.append(actor)
        if token is not None:
            filters.append("(token_id = ? OR target = ?)")
            values += [token, token]
        if before is not None:
            filters.append("seq < ?")
            values.append(before)
        statement = (
            f"SELECT data FROM audit WHERE {' AND '.join(filters)} ORDER BY seq DESC LIMIT ?"
        )
        return self._all(AuditEntry, statement, *values, limit)

    def metadata(self, name: str) -> str | None:
        rows = self._rows("SELECT value FROM metadata WHERE name = ?", name)
        return rows[0][0] if rows else None

    def put_metadata(self, name: str, value: str, *, replace: bool = True) -> None:
        """Without `replace`, only if there is none of that name."""
        if replace:
            statement = sql_commit.upsert("metadata", "name", "value")
        else:
            statement = "INSERT INTO metadata (name, value) VALUES (?, ?) ON CONFLICT DO NOTHING"
        self._write(statement, name, value)

    def write_error(self) -> Unreachable | None:
        """Why nothing can be recorded: the error of the last write, or a full disk; None: it can.
        Nothing is written to find out."""
        return self._database.write_error()

    # Objects that all servers share: the newest part of logs, encrypted secrets, and which login
    # links were used.

    def objects(self, prefix: str, since: str | None = None) -> list[StoredObject]:
        """By name. With `since`, only from the last one whose name is not after it."""
        statement, values = sql_queries.select_objects(prefix, since)
        return [
            StoredObject(name=name, size=size, at=sql_rows.from_micros(at))
            for name, size, at in self._rows(statement, *values)
        ]

    def read_objects(self, names: Sequence[str]) -> dict[str, bytes]:
        """Those that exist."""
        rows = self._rows_in_batches("SELECT name, data FROM objects WHERE name IN ({keys})", names)
        return {name: bytes(data) for name, data in rows}

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
        statement = (
            sql_commit.upsert("objects", "name", "at", "size", "data")
            if replace
            else "INSERT INTO objects (name, at, size, data) VALUES (?, ?, ?, ?) "
            "ON CONFLICT DO NOTHING"
        )
        values = (name, sql_rows.to_micros(at), len(data), data)

        def work(session: DatabaseSession) -> bool:
            self._require_user(session, required_user)
            if limit is not None:
                select, prefix = sql_queries.select_objects(limit[0], None)
                known = {row[0] for row in session.rows(select, *prefix)}
                if len(known) >= limit[1] and name not in known:
                    return False
            return bool(session.rows(f"{statement} RETURNING 1", *values))

        return self._database.write(work)

    def delete_objects(self, names: Sequence[str]) -> None:
        """Those that do not exist are ignored."""
        self._write_each("DELETE FROM objects WHERE name = ?", [(each,) for each in sorted(names)])

    # Statements.

    def close(self) -> None:
        self._database.close()

    def _rows(self, statement: str, *parameters: object) -> list[Row]:
        return self._database.read(lambda session: session.rows(statement, *parameters))

    def _rows_in_batches(self, statement: str, keys: Sequence[str]) -> list[Row]:
        """For a statement with `IN ({keys})` and any number of keys."""

        def work(session: DatabaseSession) -> list[Row]:
            return [
                row
                for batch in sql_rows.batches(keys)
                for row in session.rows(statement.format(keys=sql_rows.placeholders(batch)), *batch)
            ]

        return self._database.read(work)

    def _join(self, statement: str) -> str:
        """All rows of a SELECT of `data`, as one; see `sql_rows.split`."""
        joined = self._database.joined.format(column="data")
        return f"SELECT {joined} FROM ({statement}) AS selected"

    def _units(self, columns: Sequence[str]) -> str:
        return f" || {self._database.unit_separator} || ".join(columns)

    def _data(self, statement: str, *parameters: object) -> list[Row]:
        return sql_rows.split(self._rows(self._join(statement), *parameters))

    def _joined_in_batches(self, statement: str, keys: Sequence[str]) -> list[Row]:
        return sql_rows.split(self._rows_in_batches(self._join(statement), keys))

    def _one(self, kind: type[T], statement: str, *parameters: object) -> T | None:
        return sql_rows.decode_first(self._rows(statement, *parameters), kind)

    def _all(self, kind: type[T], statement: str, *parameters: object) -> list[T]:
        return sql_rows.decode_all(self._data(statement, *parameters), kind)

    def _require_user(self, session: DatabaseSession, name: str) -> None:
        """Locks the row: `delete_user` waits for the transaction, or this for the deletion."""
        if name:
            statement = f"SELECT name FROM users WHERE name = ?{self._database.for_update}"
            invariants.check_required_user(name, bool(session.rows(statement, name)))

    def _write(self, statement: str, *parameters: object) -> None:
        self._database.write(lambda session: session.run(statement, *parameters))

    def _write_each(self, statement: str, values: Sequence[tuple[object, ...]]) -> None:
        if values:
            self._database.write(lambda session: session.run_many(statement, values))
