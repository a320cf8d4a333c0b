"""SELECT statements with several filters, and their parameters."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tpufleet.model.job_search import MetricTerm
from tpufleet.model.jobs import ENDED_STATES, Job, JobId
from tpufleet.stores import sql_people, sql_rows
from tpufleet.stores.base import EventQuery, JobQuery

Select = tuple[str, list[Any]]

_NEWEST_FIRST = "ORDER BY submitted_at DESC, id DESC LIMIT ?"
# In this order: SQLite reads the left table of a CROSS JOIN first.
_SEARCHED_JOBS = "job_search AS found CROSS JOIN jobs"
_NEWEST_FOUND_FIRST = "ORDER BY found.submitted_at DESC, found.job_id DESC LIMIT ?"


def select_jobs(
    query: JobQuery, last: Job | None, large_sets: Collection[MetricTerm] = ()
) -> Select:
    """`last` is the last job of the previous page; `large_sets`, see `sql_people`."""
    columns = {
        "owner": query.owner,
        "pool": query.pool,
        "name": query.name,
        "parent": query.parent,
    }
    where, values = _equals(**{f"jobs.{name}": value for name, value in columns.items()})
    if query.states:
        where.append(f"jobs.state IN ({sql_rows.placeholders(list(query.states))})")
        values.extend(sorted(state.value for state in query.states))
    if query.tag is not None:
        where.append("jobs.id IN (SELECT job_id FROM job_tags WHERE tag = ?)")
        values.append(query.tag)
    for table, wanted in (("archived_jobs", query.archived), ("cleaned_jobs", query.files_deleted)):
        # Live jobs are in neither table.
        if wanted or (wanted is False and (not query.states or query.states & ENDED_STATES)):
            marked = f"EXISTS (SELECT 1 FROM {table} WHERE job_id = jobs.id)"
            where.append(marked if wanted else f"NOT {marked}")
    if last is not None:
        searched = query.search is not None and query.search.terms
        key = "found.submitted_at, found.job_id" if searched else "submitted_at, id"
        where.append(f"({key}) < (?, ?)")
        values.extend((sql_rows.to_micros(last.submitted_at), last.id))
    if query.search is None or not query.search.terms:
        return f"SELECT data FROM jobs {_where(where)} {_NEWEST_FIRST}", [*values, query.limit]
    conditions, parameters = sql_people.search_conditions(query.search, large_sets)
    where = ["jobs.id = found.job_id", *conditions, *where]
    return (
        f"SELECT jobs.data FROM {_SEARCHED_JOBS} {_where(where)} {_NEWEST_FOUND_FIRST}",
        [*parameters, *values, query.limit],
    )


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
    where, values = _equals(job_id=query.job_id, slice_id=query.slice_id, pool=query.pool)
    where.append("seq > ?")
    order = "DESC" if query.newest else "ASC"
    return (
        f"SELECT data FROM events {_where(where)} ORDER BY seq {order} LIMIT ?",
        [*values, query.after, query.limit],
    )


def select_objects(prefix: str, since: str | None) -> Select:
    end = sql_rows.prefix_end(prefix)
    assert end is not None, "the prefix is empty"
    where, values = "name >= ? AND name < ?", [prefix, end]
    if since is not None:
        where += (
            " AND name >= COALESCE((SELECT MAX(name) FROM objects WHERE name >= ? AND name <= ?"
            " AND name < ?), ?)"
        )
        values += [prefix, since, end, prefix]
    return f"SELECT name, size, at FROM objects WHERE {where} ORDER BY name", values


def _equals(**columns: object) -> tuple[list[str], list[Any]]:
    filters = {column: value for column, value in columns.items() if value is not None}
    return [f"{column} = ?" for column in filters], list(filters.values())


def _where(conditions: list[str]) -> str:
    return f"WHERE {' AND '.join(conditions)}" if conditions else ""
