"""SELECT statements with several filters, and their parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from tpufleet.model.job.job_search import MetricTerm
from tpufleet.model.job.jobs import ENDED_STATES, LIVE_STATES, Job, JobId
from tpufleet.stores.records import EventQuery, JobQuery
from tpufleet.stores.sql import sql_edits, sql_rows

Select = tuple[str, list[Any]]


SLICES_BETWEEN = (
    "SELECT data FROM slices WHERE gone_at >= ? AND requested_at <= ? ORDER BY requested_at, id"
)
ATTEMPTS_BETWEEN = (
    "SELECT data FROM attempts WHERE ended_at >= ? AND created_at <= ? ORDER BY created_at, id"
)

_NEWEST_FIRST = "ORDER BY submitted_at DESC, id DESC LIMIT ?"
_OLDEST_FIRST = "ORDER BY submitted_at, id LIMIT ?"
# In this order: SQLite reads the left table of a CROSS JOIN first.
_SEARCHED_JOBS = "job_search AS found CROSS JOIN jobs"
_NEWEST = (
    "SELECT MIN(submitted_at) FROM (SELECT submitted_at FROM job_search {where} "
    "ORDER BY submitted_at DESC, job_id DESC LIMIT ?) AS newest"
)
_CHOSEN_JOBS = "jobs CROSS JOIN job_search AS found"
_NEWEST_FOUND_FIRST = "ORDER BY found.submitted_at DESC, found.job_id DESC LIMIT ?"


def select_jobs(
    query: JobQuery,
    last: Job | None,
    large_sets: Collection[MetricTerm] = (),
    *,
    ids: Sequence[str] | None = None,
    live: bool = False,
    newest: int | None = None,
) -> Select:
    """`last` is the last job of the previous page; `large_sets`, see `sql_people`. A search also
    gives the submission time and the id; it can be limited to some ids, to live jobs, or to this
    many of the newest jobs."""
    columns = {
        "owner": query.owner,
        "pool": query.pool,
        "name": query.name,
        "parent": query.parent,
    }
    where, values = _equals(**{f"jobs.{name}": value for name, value in columns.items()})
    searched = query.search is not None and query.search.terms
    if query.states in (ENDED_STATES, LIVE_STATES):
        where.append(f"jobs.ended = {int(query.states == ENDED_STATES)}")
    elif query.having is not None and query.states:
        # Found by the index on what they have, and not by that on states.
        where.append(f"(jobs.state || '') IN ({sql_rows.placeholders(list(query.states))})")
        values.extend(sorted(state.value for state in query.states))
    elif len(query.states) > 1 and query.states & ENDED_STATES and not searched:
        return _one_state_each(query, last)
    elif query.states:
        where.append(f"jobs.state IN ({sql_rows.placeholders(list(query.states))})")
        values.extend(sorted(state.value for state in query.states))
    if query.tag is not None:
        where.append("jobs.id IN (SELECT job_id FROM job_tags WHERE tag = ?)")
        values.append(query.tag)
    is_live = bool(query.states) and not query.states & ENDED_STATES
    if query.archived or (query.archived is False and not is_live):  # live jobs are not archived
        where.append(f"jobs.archived = {int(query.archived)}")
    if query.having is not None:
        where.append(f"jobs.{query.having.value}_deleted = 0")
        if query.states and query.states < ENDED_STATES:
            where.append("jobs.ended = 1")  # as the condition of the index says
    for column, keys in (("id", query.ids), ("parent", query.parents)):
        if keys is not None:
            where.append(f"jobs.{column} IN ({sql_rows.placeholders(keys)})")
            values.extend(keys)
    if query.other_owner_than is not None:
        where.append("jobs.owner <> ?")
        values.append(query.other_owner_than)
    if last is not None:
        key = "found.submitted_at, found.job_id" if searched else "submitted_at, id"
        where.append(f"({key}) {'>' if query.oldest_first else '<'} (?, ?)")
        values.extend((sql_rows.to_micros(last.submitted_at), last.id))
    if query.search is None or not query.search.terms:
        order = _OLDEST_FIRST if query.oldest_first else _NEWEST_FIRST
        return f"SELECT data FROM jobs {_where(where)} {order}", [*values, query.limit]
    conditions, parameters = sql_edits.search_conditions(query.search, large_sets)
    where = ["jobs.id = found.job_id", *conditions, *where]
    tables = _SEARCHED_JOBS
    if live:
        where.insert(0, "found.state = ''")
    if newest is not None:
        paged = "WHERE (submitted_at, job_id) < (?, ?)" if last is not None else ""
        where.append(f"found.submitted_at >= COALESCE(({_NEWEST.format(where=paged)}), 0)")
        values += [] if last is None else [sql_rows.to_micros(last.submitted_at), last.id]
        values.append(newest)
    if ids is not None:
        tables = _CHOSEN_JOBS
        chosen = f"jobs.id IN ({sql_rows.placeholders(ids)})"
        where = [chosen, "found.submitted_at = jobs.submitted_at", *where]
        parameters = [*ids, *parameters]
    return (
        f"SELECT jobs.data, found.submitted_at, found.job_id FROM {tables} {_where(where)} "
        f"{_NEWEST_FOUND_FIRST}",
        [*parameters, *values, query.limit],
    )


def _one_state_each(query: JobQuery, last: Job | None) -> Select:
    """Several states, of which some have very many jobs: the newest of each, from an index."""
    parts, values = [], list[Any]()
    for state in sorted(query.states):
        part, parameters = select_jobs(replace(query, states=frozenset({state})), last)
        part = part.replace("SELECT data", "SELECT data, submitted_at, id", 1)
        parts.append(f"SELECT * FROM ({part}) AS {state.value}_jobs")
        values += parameters
    union = " UNION ALL ".join(parts)
    order = _OLDEST_FIRST if query.oldest_first else _NEWEST_FIRST
    return f"SELECT data FROM ({union}) AS newest {order}", [*values, query.limit]


def select_jobs_like(prefix: str, limit: int) -> Select:
    end = sql_rows.prefix_end(prefix)
    if end is None:
        where, values = "id >= ? OR name >= ?", [prefix, prefix]
    else:
        where = "(id >= ? AND id < ?) OR (name >= ? AND name < ?)"
        values = [prefix, end, prefix, end]
    return f"SELECT data FROM jobs WHERE {where} {_NEWEST_FIRST}", [*values, limit]


def select_slices(live_only: bool, pool: str | None, job_id: JobId | None) -> Select:
    where, values = _equals(pool=pool, job_id=job_id)
    if live_only:
        where.append("gone = 0")
    return f"SELECT data FROM slices {_where(where)} ORDER BY requested_at, id", values


def select_events(query: EventQuery) -> Select:
    where, values = _equals(
        job_id=query.job_id,
        slice_id=query.slice_id,
        pool=query.pool,
        by_user=query.by,
        reservation=query.reservation,
    )
    where.append("seq > ?")
    order = "DESC" if query.newest else "ASC"
    return (
        f"SELECT data FROM events {_where(where)} ORDER BY seq {order} LIMIT ?",
        [*values, query.after, query.limit],
    )


def select_objects(prefix: str, since: str | None) -> Select:
    where, values = "name >= ?", [prefix]
    if (end := sql_rows.prefix_end(prefix)) is not None:
        where, values = f"{where} AND name < ?", [prefix, end]
    if since is not None:
        newest = f"SELECT MAX(name) FROM objects WHERE {where} AND name <= ?"
        where += f" AND name >= COALESCE(({newest}), ?)"
        values += [*values, since, prefix]
    return f"SELECT name, size, at FROM objects WHERE {where} ORDER BY name", values


def _equals(**columns: object) -> tuple[list[str], list[Any]]:
    filters = {column: value for column, value in columns.items() if value is not None}
    return [f"{column} = ?" for column in filters], list(filters.values())


def _where(conditions: list[str]) -> str:
    return f"WHERE {' AND '.join(conditions)}" if conditions else ""
