"""The store on a SQL database: one set of statements for every database.

What a commit writes is in `commits`, what a listing asks for in `queries`, and users, tokens and
errands are in `sql_people`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from tpufleet.model.attempts import Attempt, AttemptId
from tpufleet.model.events import Event
from tpufleet.model.hosts import Host, HostId, HostLiveness
from tpufleet.model.jobs import Job, JobId, JobState
from tpufleet.model.messages import InboxMessage
from tpufleet.model.pools import Pool, CapacityRefusal
from tpufleet.model.slices import SliceId, TpuSlice
from tpufleet.stores import commits, queries, rows
from tpufleet.stores.base import ChangeSet, EventQuery, JobQuery, Lease, LiveState
from tpufleet.stores.databases import Database, Session
from tpufleet.stores.sql_people import SqlPeople

_PULSE = """
INSERT INTO pulses (host_id, seen_at, attempt_id, progress) VALUES (?, ?, ?, ?)
ON CONFLICT (host_id) DO UPDATE SET
    seen_at = CASE WHEN excluded.seen_at > pulses.seen_at
        THEN excluded.seen_at ELSE pulses.seen_at END,
    progress = CASE WHEN excluded.progress IS NULL AND (
            excluded.attempt_id = pulses.attempt_id
            OR (excluded.attempt_id IS NULL AND pulses.attempt_id IS NULL))
        THEN pulses.progress ELSE excluded.progress END,
    attempt_id = excluded.attempt_id
"""
_LIVE = {
    Job: "SELECT data FROM jobs WHERE ended = 0 ORDER BY submitted_at, id",
    Attempt: "SELECT data FROM attempts WHERE job_id IN (SELECT id FROM jobs WHERE ended = 0) "
    "ORDER BY job_id, number",
    TpuSlice: "SELECT data FROM slices WHERE gone = 0 ORDER BY requested_at, id",
    Host: "SELECT data FROM hosts WHERE slice_id IN (SELECT id FROM slices WHERE gone = 0) "
    "ORDER BY slice_id, number",
    Pool: "SELECT data FROM pools ORDER BY name",
    CapacityRefusal: "SELECT data FROM refusals ORDER BY id",
}


class SqlStore(SqlPeople):
    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._decode_jobs = rows.CachingDecoder(Job)
        self._decode_attempts = rows.CachingDecoder(Attempt)

    # Jobs and attempts.

    def job(self, job_id: JobId) -> Job | None:
        return self._one(Job, "SELECT data FROM jobs WHERE id = ?", job_id)

    def jobs(self, query: JobQuery) -> list[Job]:
        last = None if query.before is None else self.job(query.before)
        if last is None and query.before is not None:
            return []
        statement, values = queries.select_jobs(query, last)
        return self._decode_jobs(self._rows(statement, *values))

    def jobs_like(self, prefix: str, limit: int = 10) -> list[Job]:
        statement, values = queries.select_jobs_like(prefix, limit)
        return self._decode_jobs(self._rows(statement, *values))

    def count_jobs(self) -> dict[JobState, int]:
        found = self._rows("SELECT state, COUNT(*) FROM jobs GROUP BY state")
        return {JobState(state): count for state, count in found}

    def cleaned_at(self, job_id: JobId) -> datetime | None:
        found = self._rows("SELECT at FROM cleaned_jobs WHERE job_id = ?", job_id)
        return rows.from_micros(found[0][0]) if found else None

    def clean(self, jobs: Sequence[JobId], at: datetime) -> None:
        self._write_each(
            "INSERT INTO cleaned_jobs (job_id, at) VALUES (?, ?) ON CONFLICT DO NOTHING",
            [(job_id, rows.to_micros(at)) for job_id in jobs],
        )

    def attempt(self, attempt_id: AttemptId) -> Attempt | None:
        return self._one(Attempt, "SELECT data FROM attempts WHERE id = ?", attempt_id)

    def attempts(self, job_id: JobId) -> list[Attempt]:
        return self._all(
            Attempt, "SELECT data FROM attempts WHERE job_id = ? ORDER BY number", job_id
        )

    def newest_attempts(self, jobs: Sequence[JobId]) -> dict[JobId, Attempt]:
        found = self._rows_in_parts(
            "SELECT data FROM attempts AS newest WHERE job_id IN ({keys}) AND number = "
            "(SELECT MAX(number) FROM attempts WHERE job_id = newest.job_id)",
            jobs,
        )
        return {attempt.job_id: attempt for attempt in self._decode_attempts(found)}

    # Slices and hosts.

    def slice(self, slice_id: SliceId) -> TpuSlice | None:
        return self._one(TpuSlice, "SELECT data FROM slices WHERE id = ?", slice_id)

    def slices(
        self, *, live_only: bool = True, pool: str | None = None, job_id: JobId | None = None
    ) -> list[TpuSlice]:
        statement, values = queries.select_slices(live_only, pool, job_id)
        return self._all(TpuSlice, statement, *values)

    def host(self, host_id: HostId) -> Host | None:
        return self._one(Host, "SELECT data FROM hosts WHERE id = ?", host_id)

    def hosts(self, slice_id: SliceId) -> list[Host]:
        return self._all(
            Host, "SELECT data FROM hosts WHERE slice_id = ? ORDER BY number", slice_id
        )

    # Events and messages.

    def events(self, query: EventQuery) -> list[Event]:
        statement, values = queries.select_events(query)
        found = self._all(Event, statement, *values)
        return found[::-1] if query.newest else found

    def last_event(self) -> int:
        return self._rows("SELECT events FROM numbers WHERE id = 1")[0][0]

    def inbox(self, after: int = 0, limit: int = 10_000) -> list[InboxMessage]:
        return self._all(
            InboxMessage, "SELECT data FROM inbox WHERE seq > ? ORDER BY seq LIMIT ?", after, limit
        )

    # Pools, and everything alive.

    def pools(self) -> list[Pool]:
        return self._all(Pool, _LIVE[Pool])

    def pool(self, name: str) -> Pool | None:
        return self._one(Pool, "SELECT data FROM pools WHERE name = ?", name)

    def refusals(self) -> list[CapacityRefusal]:
        return self._all(CapacityRefusal, _LIVE[CapacityRefusal])

    def live(self) -> LiveState:
        found = self._database.snapshot(
            lambda session: {kind: session.rows(statement) for kind, statement in _LIVE.items()}
        )
        return LiveState(
            jobs=self._decode_jobs(found[Job]),
            attempts=self._decode_attempts(found[Attempt]),
            slices=rows.decode_all(found[TpuSlice], TpuSlice),
            hosts=rows.decode_all(found[Host], Host),
            pools=rows.decode_all(found[Pool], Pool),
            refusals=rows.decode_all(found[CapacityRefusal], CapacityRefusal),
        )

    def commit(self, change: ChangeSet, *, fence: Lease | None = None) -> None:
        for_update = self._database.for_update
        self._database.write(lambda session: commits.apply_change_set(session, change, fence, for_update))

    # Signs of life.

    def record_liveness(self, pulses: Sequence[HostLiveness]) -> None:
        # By host, so that two servers that write at once never wait for each other in a circle.
        ordered = sorted(pulses, key=lambda pulse: pulse.host_id)
        self._write_each(_PULSE, [rows.liveness_row(pulse) for pulse in ordered])

    def host_liveness(self, hosts: Sequence[HostId]) -> dict[HostId, HostLiveness]:
        statement = (
            "SELECT host_id, seen_at, attempt_id, progress FROM pulses WHERE host_id IN ({keys})"
        )
        return {row[0]: rows.liveness_from_row(row) for row in self._rows_in_parts(statement, hosts)}

    def silent_hosts(self, since: datetime) -> list[HostId]:
        statement = (
            "SELECT pulses.host_id FROM pulses JOIN hosts ON hosts.id = pulses.host_id "
            "JOIN slices ON slices.id = hosts.slice_id "
            "WHERE pulses.seen_at < ? AND slices.gone = 0"
        )
        return sorted(host_id for (host_id,) in self._rows(statement, rows.to_micros(since)))

    def count_seen_hosts(self, since: datetime) -> int:
        statement = "SELECT COUNT(*) FROM pulses WHERE seen_at >= ?"
        return self._rows(statement, rows.to_micros(since))[0][0]

    def bind_agent(self, host_id: HostId, digest: str) -> str:
        def work(session: Session) -> str:
            session.run(
                "INSERT INTO entries (host_id, digest) VALUES (?, ?) ON CONFLICT DO NOTHING",
                host_id,
                digest,
            )
            return session.rows("SELECT digest FROM entries WHERE host_id = ?", host_id)[0][0]

        return self._database.write(work)

    def delete_liveness(self, hosts: Sequence[HostId]) -> None:
        keys = [(host_id,) for host_id in sorted(hosts)]
        self._write_each("DELETE FROM pulses WHERE host_id = ?", keys)
        self._write_each("DELETE FROM entries WHERE host_id = ?", keys)

    # Leases.

    def acquire_lease(
        self, name: str, holder: str, ttl: timedelta, now: datetime
    ) -> Lease | None:
        def work(session: Session) -> Lease | None:
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
            if before not in (None, holder) and rows.to_micros(now) < expires_at:
                return None
            token = token if before == holder else token + 1
            session.run(
                "UPDATE leases SET holder = ?, token = ?, expires_at = ? WHERE name = ?",
                holder,
                token,
                rows.to_micros(now + ttl),
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
