"""Writes one change set as SQL, inside a transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice
from tpufleet.model.job.attempts import Attempt
from tpufleet.model.job.jobs import ENDED_STATES, Job, JobState
from tpufleet.stores import invariants
from tpufleet.stores.records import ChangeSet, Lease, StoreChange
from tpufleet.stores.sql import job_references, sql_edits, sql_rows
from tpufleet.stores.sql.database import Database, DatabaseSession, Query, Row


def upsert(table: str, key: str, *others: str) -> str:
    columns = (key, *others)
    assignments = ", ".join(f"{column} = excluded.{column}" for column in others)
    return (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({sql_rows.placeholders(columns)}) "
        f"ON CONFLICT ({key}) DO UPDATE SET {assignments}"
    )


_NEW_JOB = (
    "INSERT INTO jobs (id, submitted_at, owner, state, ended, pool, name, parent, data) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
# Owner, parent and submission time never change, and the name only by an edit.
_JOB = (
    f"{_NEW_JOB} ON CONFLICT (id) DO UPDATE SET "
    "state = excluded.state, ended = excluded.ended, data = excluded.data"
)
_COUNT = (
    "INSERT INTO job_counts (state, count) VALUES (?, ?) "
    "ON CONFLICT (state) DO UPDATE SET count = job_counts.count + excluded.count"
)
_TAG = "INSERT INTO job_tags (tag, job_id) VALUES (?, ?) ON CONFLICT DO NOTHING"
_ATTEMPT = upsert("attempts", "id", "job_id", "number", "ended", "created_at", "ended_at", "data")
_SLICE = upsert("slices", "id", "requested_at", "gone", "gone_at", "pool", "job_id", "data")
_HOST = upsert("hosts", "id", "slice_id", "host_index", "data")
_REFUSAL = upsert("capacity_refusals", "id", "data")
_POOL = upsert("pools", "name", "data")


def apply_change_set(
    session: DatabaseSession, change: ChangeSet, fence: Lease | None, database: Database
) -> None:
    stored = _read_stored(session, change, fence, database.for_update)
    _write_jobs(session, change, stored.jobs)
    _write_attempts(session, change.attempts, stored.attempts)
    _write_slices(session, change.slices, stored.slices)
    _write_each(session, _HOST, [sql_rows.host_row(each) for each in change.hosts])
    _write_each(session, _REFUSAL, [(each.key, sql_rows.to_text(each)) for each in change.refusals])
    _write_each(session, _POOL, [(each.name, sql_rows.to_text(each)) for each in change.pools])
    _write_each(
        session, "DELETE FROM pools WHERE name = ?", [(name,) for name in change.deleted_pools]
    )
    _write_each(session, "DELETE FROM inbox WHERE seq = ?", [(seq,) for seq in change.consumed])
    _write_numbered(session, change, stored.last_event, stored.last_message)
    if change.messages:
        session.notify(StoreChange.MESSAGES)
    if change.events:
        session.notify(StoreChange.EVENTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """What the database has of the things that a change set writes."""

    last_event: int  # with the events of the change set
    last_message: int
    jobs: Sequence[Row]  # id, state, edits
    attempts: Sequence[Row]
    slices: Sequence[Row]


def _read_stored(
    session: DatabaseSession, change: ChangeSet, fence: Lease | None, for_update: str
) -> _Stored:
    """All that is to be known before anything is written, in one round trip."""
    queries: list[Query] = []
    if fence is not None:
        queries.append(_fence_query(fence, for_update))
    # This row is locked until the commit, so no other change can invalidate what is read below.
    numbers = (
        f"UPDATE sequences SET events = events + {len(change.events)}, "
        f"inbox = inbox + {len(change.messages)} WHERE id = 1 RETURNING events, inbox"
    )
    queries.append((numbers, ()))
    if change.required_user:
        queries.append(("SELECT name FROM users WHERE name = ?", (change.required_user,)))
    job_ids = [job.id for job in (*change.new_jobs, *change.jobs)]
    selections = [
        _by_id("id, state, edits FROM jobs", job_ids),
        _by_id("data FROM attempts", [attempt.id for attempt in change.attempts]),
        _by_id("data FROM slices", [tpu_slice.id for tpu_slice in change.slices]),
    ]
    queries += chain.from_iterable(selections)

    results = iter(session.rows_of_each(queries))
    if fence is not None:
        _check_fence_rows(fence, next(results))
    ((last_event, last_message),) = next(results)
    if change.required_user:
        invariants.check_required_user(change.required_user, bool(next(results)))
    jobs, attempts, slices = (
        list(chain.from_iterable(islice(results, len(selection)))) for selection in selections
    )
    return _Stored(
        last_event=last_event,
        last_message=last_message,
        jobs=jobs,
        attempts=attempts,
        slices=slices,
    )


def _by_id(columns_and_table: str, ids: Sequence[str]) -> list[Query]:
    return [
        (f"SELECT {columns_and_table} WHERE id IN ({sql_rows.placeholders(batch)})", batch)
        for batch in sql_rows.batches(ids)
    ]


def _write_each(
    session: DatabaseSession, statement: str, values: Sequence[tuple[object, ...]]
) -> None:
    if values:
        session.run_many(statement, values)


def check_fence(session: DatabaseSession, fence: Lease, for_update: str) -> None:
    statement, parameters = _fence_query(fence, for_update)
    _check_fence_rows(fence, session.rows(statement, *parameters))


def _fence_query(fence: Lease, for_update: str) -> Query:
    return f"SELECT holder, token FROM leases WHERE name = ?{for_update}", (fence.name,)


def _check_fence_rows(fence: Lease, rows: Sequence[Row]) -> None:
    holder, token = rows[0] if rows else (None, 0)
    invariants.check_fence(fence, holder, token)


def _write_jobs(session: DatabaseSession, change: ChangeSet, rows: Sequence[Row]) -> None:
    new = change.new_jobs
    stored = {job_id: JobState(state) for job_id, state, _ in rows}
    edits = {job_id: text for job_id, _, text in rows}
    invariants.check_new_job_ids(new, stored.keys())
    changed = [sql_edits.with_stored_edits(job, edits.get(job.id)) for job in change.jobs]
    invariants.check_transitions("job", ((job.id, job.state) for job in changed), stored.items())
    searched = [*new, *(job for job in changed if job.ended or job.id not in stored)]
    # It reads, so it comes before what is to be written with the commit.
    job_references.write_references(session, [job for job in searched if job.id not in stored])
    _write_each(session, _NEW_JOB, [sql_rows.job_row(job) for job in new])
    _write_each(session, _JOB, [sql_rows.job_row(job) for job in changed])
    _write_each(session, _TAG, sql_rows.tag_rows([*new, *changed]))
    _write_each(session, sql_edits.SEARCH, [sql_edits.search_row(job) for job in searched])
    sql_edits.write_edits(session, change.edits)
    _count_ended(session, (*new, *changed), stored)


def _count_ended(
    session: DatabaseSession, written: Sequence[Job], stored: Mapping[str, JobState]
) -> None:
    counts: Counter[JobState] = Counter()
    for job_id, state in {job.id: job.state for job in written}.items():  # the last of each wins
        counts[state] += 1
        if (before := stored.get(job_id)) is not None:
            counts[before] -= 1
    rows = [
        (state.value, count) for state, count in counts.items() if count and state in ENDED_STATES
    ]
    _write_each(session, _COUNT, rows)


def _write_attempts(
    session: DatabaseSession, attempts: Sequence[Attempt], rows: Sequence[Row]
) -> None:
    stored = {attempt.id: attempt for attempt in sql_rows.decode_all(rows, Attempt)}
    changed = invariants.attempts_to_write(attempts, stored)
    _write_each(session, _ATTEMPT, [sql_rows.attempt_row(attempt) for attempt in changed])
    ended = [attempt for attempt in changed if not attempt.live]
    metrics = [row for attempt in ended for row in sql_edits.metric_rows(attempt)]
    _write_each(session, sql_edits.LATEST_METRIC, metrics)


def _write_slices(
    session: DatabaseSession, slices: Sequence[TpuSlice], rows: Sequence[Row]
) -> None:
    stored = ((each.id, each.state) for each in sql_rows.decode_all(rows, _StoredSlice))
    invariants.check_transitions("slice", ((each.id, each.state) for each in slices), stored)
    _write_each(session, _SLICE, [sql_rows.slice_row(tpu_slice) for tpu_slice in slices])


@dataclass(frozen=True, slots=True)
class _StoredSlice:
    """The part of a stored slice that is checked."""

    id: SliceId
    state: SliceState


def _write_numbered(
    session: DatabaseSession, change: ChangeSet, last_event: int, last_message: int
) -> None:
    first_event = last_event - len(change.events) + 1
    first_message = last_message - len(change.messages) + 1
    events = [replace(event, seq=seq) for seq, event in enumerate(change.events, first_event)]
    messages = [
        replace(message, seq=seq) for seq, message in enumerate(change.messages, first_message)
    ]
    _write_each(
        session,
        "INSERT INTO inbox (seq, data) VALUES (?, ?)",
        [(message.seq, sql_rows.to_text(message)) for message in messages],
    )
    _write_each(
        session,
        "INSERT INTO events (seq, job_id, slice_id, pool, by_user, reservation, data) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        [sql_rows.event_row(event) for event in events],
    )
