"""Which jobs a search is for, computed from the jobs themselves: what stores are compared with."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

from tpufleet.model.job.job_search import (
    FieldTerm,
    JobSearch,
    MetricTerm,
    SearchField,
    SearchTerm,
    SubmittedTerm,
    TextTerm,
    has_wildcard,
    matches_wildcard,
    search_words,
)
from tpufleet.model.job.jobs import Job

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne,
    "<": operator.lt, ">": operator.gt, "=": operator.eq,
}  # fmt: skip


def matches(job: Job, search: JobSearch, metrics: Mapping[str, float]) -> bool:
    return all(_matches(job, term, metrics) is not term.negated for term in search.terms)


def _matches(job: Job, term: SearchTerm, metrics: Mapping[str, float]) -> bool:
    match term:
        case TextTerm():
            return term.text in search_words(job)
        case SubmittedTerm():
            return (job.submitted_at < term.moment) is term.before
        case MetricTerm():
            return term.name in metrics and _COMPARE[term.operator](metrics[term.name], term.value)
        case FieldTerm():
            known = _field_values(job, term.field)
            return any(
                matches_wildcard(value, each)
                if has_wildcard(value)
                else value == each
                if value in term.case_sensitive
                else value.lower() == each.lower()
                for value in term.values
                for each in known
            )


def _field_values(job: Job, field: SearchField) -> tuple[str, ...]:
    if field is SearchField.TAG:
        return job.spec.tags
    values: dict[SearchField, str | None] = {
        SearchField.OWNER: job.owner,
        SearchField.STATE: job.state.value,
        SearchField.NAME: job.spec.name,
        SearchField.POOL: job.spec.pool,
        SearchField.TYPE: job.spec.accelerator,
        SearchField.ID: job.id,
        SearchField.PARENT: job.parent,
    }
    return (values[field] or "",)
