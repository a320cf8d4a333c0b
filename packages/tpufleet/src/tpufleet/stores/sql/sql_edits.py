"""Statements for what users change and search: edits of jobs, the search table, metrics."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from tpufleet.model.job.attempts import Attempt
from tpufleet.model.job.job_edits import JobEdit, apply_edit, merge_edits
from tpufleet.model.job.job_search import (
    FieldTerm,
    JobSearch,
    MetricTerm,
    SearchField,
    SearchTerm,
    SubmittedTerm,
    TextTerm,
    has_wildcard,
    search_tags,
    search_words,
)
from tpufleet.model.job.jobs import ENDED_STATES, Job, JobState
from tpufleet.model.job.metric_points import MetricPoint, searchable_values
from tpufleet.model.values.encoding import from_json
from tpufleet.stores.sql import sql_rows
from tpufleet.stores.sql.database import DatabaseSession, Row

SEARCH = (
    "INSERT INTO job_search (submitted_at, job_id, owner, state, pool, parent, name, accelerator, "
    "tags, words) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (submitted_at, job_id) "
    "DO UPDATE SET state = excluded.state, name = excluded.name, tags = excluded.tags, "
    "words = excluded.words"
)
LATEST_METRIC = (
    "INSERT INTO job_metrics (name, job_id, value) VALUES (?, ?, ?) "
    "ON CONFLICT (name, job_id) DO UPDATE SET value = excluded.value"
)
_POINT = (
    "INSERT INTO metric_points (job_id, at, data) VALUES (?, ?, ?) "
    "ON CONFLICT (job_id, at) DO UPDATE SET data = excluded.data"
)


def search_row(job: Job) -> Row:
    spec = job.spec
    return (
        sql_rows.to_micros(job.submitted_at),
        job.id,
        job.owner.lower(),
        job.state.value if job.ended else "",
        (spec.pool or "").lower(),
        job.parent or "",
        spec.name.lower(),
        spec.accelerator,
        search_tags(job),
        search_words(job),
    )


def metric_rows(ended: Attempt) -> list[Row]:
    """The last metrics of an attempt that has ended."""
    values = searchable_values(ended.last_step, ended.metrics)
    return [(name, ended.job_id, value) for name, value in values.items()]


def with_stored_edits(job: Job, edits: str | None) -> Job:
    return job if edits is None else apply_edit(job, from_json(edits, JobEdit))


def write_edits(session: DatabaseSession, edits: Sequence[JobEdit]) -> None:
    for edit in edits:
        rows = session.rows("SELECT data, edits FROM jobs WHERE id = ?", edit.job_id)
        if not rows:
            continue
        data, earlier = rows[0]
        merged = edit if earlier is None else merge_edits(from_json(earlier, JobEdit), edit)
        job = apply_edit(from_json(data, Job), merged)
        session.run(
            "UPDATE jobs SET name = ?, data = ?, edits = ? WHERE id = ?",
            job.spec.name,
            sql_rows.to_text(job),
            sql_rows.to_text(merged),
            job.id,
        )
        if edit.tags is not None:
            session.run("DELETE FROM job_tags WHERE job_id = ?", job.id)
            for tag in dict.fromkeys(job.spec.tags):
                session.run("INSERT INTO job_tags (tag, job_id) VALUES (?, ?)", tag, job.id)
        session.run(SEARCH, *search_row(job))


# Metrics.


def write_points(session: DatabaseSession, points: Sequence[MetricPoint]) -> None:
    session.run_many(
        _POINT,
        [(point.job_id, sql_rows.to_micros(point.at), sql_rows.to_text(point)) for point in points],
    )
    latest = [
        (name, point.job_id, value)
        for point in points
        for name, value in searchable_values(point.step, point.values).items()
    ]
    # Ordered, so that two servers that write at once cannot deadlock.
    ordered = sorted(latest, key=lambda row: row[:2])
    if ordered:
        session.run_many(LATEST_METRIC, ordered)


# Searches.

_COLUMNS = {
    SearchField.OWNER: "found.owner",
    SearchField.POOL: "found.pool",
    SearchField.ID: "found.job_id",
    SearchField.PARENT: "found.parent",
    SearchField.NAME: "found.name",
    SearchField.TYPE: "found.accelerator",
    SearchField.TAG: "found.tags",
}
_LIKE = "{column} LIKE ? ESCAPE '\\'"
# A set of up to this many jobs is read first; a larger one is probed for each job of the listing.
MAX_METRIC_SET = 20_000
METRIC_SET_SIZE = (
    "SELECT COUNT(*) FROM (SELECT 1 FROM job_metrics WHERE {condition} LIMIT "
    f"{MAX_METRIC_SET}) AS matching"
)


def metric_condition(term: MetricTerm) -> tuple[str, list[Any]]:
    operator = {"!=": "<>"}.get(term.operator, term.operator)
    return f"name = ? AND value {operator} ?", [term.name, term.value]


def search_conditions(
    search: JobSearch, large_sets: Collection[MetricTerm] = ()
) -> tuple[list[str], list[Any]]:
    """For the WHERE clause of a SELECT from `job_search AS found` and `jobs`."""
    conditions: list[str] = []
    values: list[Any] = []
    for term in search.terms:
        condition, parameters = _condition(term, term in large_sets)
        conditions.append(f"NOT ({condition})" if term.negated else f"({condition})")
        values.extend(parameters)
    return conditions, values


def _condition(term: SearchTerm, is_large: bool) -> tuple[str, list[Any]]:
    match term:
        case TextTerm():
            return _LIKE.format(column="found.words"), [f"%{_escaped(term.text)}%"]
        case SubmittedTerm():
            operator = "<" if term.before else ">="
            return f"found.submitted_at {operator} ?", [sql_rows.to_micros(term.moment)]
        case MetricTerm():
            condition, values = metric_condition(term)
            rows = f"FROM job_metrics WHERE {condition}"
            if is_large:
                return f"EXISTS (SELECT 1 {rows} AND job_id = found.job_id)", values
            return f"found.job_id IN (SELECT job_id {rows})", values
        case FieldTerm(field=SearchField.STATE):
            return _state_condition(term.values)
        case FieldTerm():
            return _field_condition(term)


def _state_condition(states: Sequence[str]) -> tuple[str, list[Any]]:
    if {JobState(state) for state in states} == ENDED_STATES:
        return "found.state <> ''", []
    ended = [state for state in states if JobState(state) in ENDED_STATES]
    live = [state for state in states if state not in ended]
    conditions = [_one_of("found.state", ended)] if ended else []
    if live:
        marks = sql_rows.placeholders(live)
        conditions.append(f"(found.state = '' AND jobs.state IN ({marks}))")
    return " OR ".join(conditions), [*ended, *live]


def _field_condition(term: FieldTerm) -> tuple[str, list[Any]]:
    column, in_list = _COLUMNS[term.field], term.field is SearchField.TAG
    cased = sorted(term.case_sensitive)
    plain = [value for value in term.values if not has_wildcard(value)]
    exact = [value.lower() for value in plain if value not in cased]
    patterns = [_like_pattern(value) for value in term.values if has_wildcard(value)]
    if in_list:
        exact, patterns = [], [*map(_escaped, exact), *patterns]
        patterns = [f"%\n{pattern}\n%" for pattern in patterns]
    conditions = [_one_of(column, exact)] if exact else []
    conditions += [_LIKE.format(column=column)] * len(patterns)
    conditions += ["(found.owner = ? AND jobs.owner = ?)"] * len(cased)  # only of owners
    pairs = [text for value in cased for text in (value.lower(), value)]
    return " OR ".join(conditions), [*exact, *patterns, *pairs]


def _one_of(column: str, values: Sequence[str]) -> str:
    """With one value, an index gives the rows in the order of the listing."""
    if len(values) == 1:
        return f"{column} = ?"
    return f"{column} IN ({sql_rows.placeholders(values)})"


def _escaped(text: str) -> str:
    return re.sub(r"[\\%_]", r"\\\g<0>", text)


def _like_pattern(wildcards: str) -> str:
    return _escaped(wildcards.lower()).replace("*", "%").replace("?", "_")
