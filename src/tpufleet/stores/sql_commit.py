"""The one write for jobs and what belongs to them, as SQL. Runs inside a transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tpufleet.model.attempts import Attempt, AttemptId
from tpufleet.model.jobs import Job, JobId
from tpufleet.stores import invariants, sql_rows
from tpufleet.stores.base import ChangeSet, Lease
from tpufleet.stores.database import Session


def upsert(table: str, columns: str) -> str:
    key, *others = columns.split(", ")
    settings = ", ".join(f"{column} = excluded.{column}" for column in others)
    return (
        f"INSERT INTO {table} ({columns}) VALUES ({sql_rows.placeholders([key, *others])}) "
        f"ON CONFLICT ({key}) DO UPDATE SET {settings}"
    )


_NEW_JOB = (
    "INSERT INTO jobs (id, submitted_at, owner, state, ended, pool, name, parent, data) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
# Owner, parent, spec and time of submission never change, so neither do their indexes.
_JOB = (
    f"{_NEW_JOB} ON CONFLICT (id) DO UPDATE SET "
    "state = excluded.state, ended = excluded.ended, data = excluded.data"
)
_TAG = "INSERT INTO job_tags (tag, job_id) VALUES (?, ?) ON CONFLICT DO NOTHING"
_ATTEMPT = upsert("attempts", "id, job_id, number, ended, data")
_SLICE = upsert("slices", "id, requested_at, gone, pool, job_id, data")
_HOST = upsert("hosts", "id, slice_id, number, data")
_REFUSAL = upsert("refusals", "id, data")
_POOL = upsert("pools", "name, data")


def apply_change_set(
    session: Session, change: ChangeSet, fence: Lease | None, for_update: str
) -> None:
    if fence is not None:
        _check(session, fence, for_update)
    # From here to the commit no other change gets in: what is looked up below stays true.
    session.run(
        "UPDATE numbers SET events = events + ?, inbox = inbox + ? WHERE id = 1",
        len(change.events),
        len(change.messages),
    )
    _write_jobs(session, change)
    _write_attempts(session, change.attempts)
    _write_each(session, _SLICE, [sql_rows.slice_row(each) for each in change.slices])
    _write_each(session, _HOST, [sql_rows.host_row(each) for each in change.hosts])
    _write_each(session, _REFUSAL, [(each.key, sql_rows.to_text(each)) for each in change.refusals])
    _write_each(session, _POOL, [(each.name, sql_rows.to_text(each)) for each in change.pools])
    _write_each(
        session, "DELETE FROM pools WHERE name = ?", [(name,) for name in change.deleted_pools]
    )
    _write_each(session, "DELETE FROM inbox WHERE seq = ?", [(seq,) for seq in change.consumed])
    if change.events or change.messages:
        _write_numbered(session, change)


def _write_each(session: Session, statement: str, values: Sequence[tuple[object, ...]]) -> None:
    if values:
        session.run_many(statement, values)


def _check(session: Session, fence: Lease, for_update: str) -> None:
    found = session.rows(f"SELECT holder, token FROM leases WHERE name = ?{for_update}", fence.name)
    holder, token = found[0] if found else (None, 0)
    invariants.check_fence(fence, holder, token)


def _write_jobs(session: Session, change: ChangeSet) -> None:
    new = change.new_jobs
    invariants.check_new_job_ids(new, _taken(session, new))
    _write_each(session, _NEW_JOB, [sql_rows.job_row(job) for job in new])
    _write_each(session, _JOB, [sql_rows.job_row(job) for job in change.jobs])
    _write_each(session, _TAG, sql_rows.tag_rows([*new, *change.jobs]))


def _taken(session: Session, jobs: Sequence[Job]) -> set[JobId]:
    taken: set[JobId] = set()
    for part in sql_rows.batches([job.id for job in jobs]):
        found = session.rows(
            f"SELECT id FROM jobs WHERE id IN ({sql_rows.placeholders(part)})", *part
        )
        taken.update(job_id for (job_id,) in found)
    return taken


def _write_attempts(session: Session, attempts: Sequence[Attempt]) -> None:
    ended: dict[AttemptId, Attempt] = {}
    for part in sql_rows.batches([attempt.id for attempt in attempts]):
        found = session.rows(
            f"SELECT data FROM attempts WHERE id IN ({sql_rows.placeholders(part)}) AND ended = 1",
            *part,
        )
        ended.update((attempt.id, attempt) for attempt in sql_rows.decode_all(found, Attempt))
    wanted = invariants.attempts_to_write(attempts, ended)
    _write_each(session, _ATTEMPT, [sql_rows.attempt_row(attempt) for attempt in wanted])


def _write_numbered(session: Session, change: ChangeSet) -> None:
    last_event, last_message = session.rows("SELECT events, inbox FROM numbers WHERE id = 1")[0]
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
        "INSERT INTO events (seq, job_id, slice_id, data) VALUES (?, ?, ?, ?)",
        [sql_rows.event_row(event) for event in events],
    )
