"""Searches for text. A word index of ended jobs gives the few that can match; what it gives is then
compared like any other row. Text that many jobs have is found sooner by reading the newest jobs."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from tpufleet.model.job.job_search import (
    FieldTerm,
    JobSearch,
    MetricTerm,
    SearchField,
    TextTerm,
    has_wildcard,
)
from tpufleet.model.job.jobs import Job
from tpufleet.stores.records import JobQuery
from tpufleet.stores.sql import sql_queries, sql_rows
from tpufleet.stores.sql.database import Database, DatabaseSession, Row

# With more matches than this, the newest of them are among the first rows of a listing.
MAX_CANDIDATES = 5_000
# What many jobs have is found among these; what few have is read from an index and sorted.
FIRST_ROWS = 10_000
_GRAM = 3  # characters
_TAGGED = "SELECT job_id FROM job_tags WHERE lower(tag) = ?"


def select(
    session: DatabaseSession,
    database: Database,
    query: JobQuery,
    last: Job | None,
    large_sets: Collection[MetricTerm],
) -> list[Row]:
    """Rows with the data of jobs, newest first."""
    assert query.search is not None
    grams = _grams(query.search)
    tag = _tag(query.search)
    if grams and database.word_matches:
        ids = _ids(session, database.word_matches, database.word_query(sorted(grams)))
        if ids is not None:
            live = sql_queries.select_jobs(query, last, large_sets, live=True)
            return _merged(
                query, _found(session, query, last, large_sets, ids), _rows(session, live)
            )
    elif tag is not None:
        ids = _ids(session, _TAGGED, tag)
        if ids is not None:
            return _merged(query, _found(session, query, last, large_sets, ids), [])
    for newest in (FIRST_ROWS, None):
        rows = _rows(session, sql_queries.select_jobs(query, last, large_sets, newest=newest))
        if len(rows) == query.limit:
            break
    return [row[:1] for row in rows]


def _rows(session: DatabaseSession, select: sql_queries.Select) -> list[Row]:
    statement, values = select
    return session.rows(statement, *values)


def _ids(session: DatabaseSession, matches: str, value: str) -> list[str] | None:
    """The jobs that can match; None: too many."""
    rows = session.rows(f"{matches} LIMIT {MAX_CANDIDATES + 1}", value)
    return None if len(rows) > MAX_CANDIDATES else sorted({job_id for (job_id,) in rows})


def _found(
    session: DatabaseSession,
    query: JobQuery,
    last: Job | None,
    large_sets: Collection[MetricTerm],
    ids: Sequence[str],
) -> list[Row]:
    return [
        row
        for batch in sql_rows.batches(ids)
        for row in _rows(session, sql_queries.select_jobs(query, last, large_sets, ids=batch))
    ]


def _merged(query: JobQuery, found: Sequence[Row], live: Sequence[Row]) -> list[Row]:
    """Rows are (data, submitted_at, id)."""
    unique = {row[2]: row for row in (*found, *live)}
    newest = heapq.nlargest(query.limit, unique.values(), key=lambda row: row[1:])
    return [row[:1] for row in newest]


def _grams(search: JobSearch) -> set[str]:
    """Three characters in a row that the words of every match have."""
    texts = [term.text for term in search.terms if isinstance(term, TextTerm) and not term.negated]
    texts += [
        " ".join(term.values[0].lower().split())
        for term in search.terms
        if isinstance(term, FieldTerm)
        and term.field in (SearchField.NAME, SearchField.ID)  # the first of its words
        and not term.negated
        and len(term.values) == 1
        and not has_wildcard(term.values[0])
    ]
    return {text[at : at + _GRAM] for text in texts for at in range(len(text) - _GRAM + 1)}


def _tag(search: JobSearch) -> str | None:
    """A tag of every match. In ASCII, of which every database knows the lower case."""
    for term in search.terms:
        if isinstance(term, FieldTerm) and term.field is SearchField.TAG and not term.negated:
            value = term.values[0].lower()
            if len(term.values) == 1 and not has_wildcard(value) and value.isascii():
                return value
    return None
