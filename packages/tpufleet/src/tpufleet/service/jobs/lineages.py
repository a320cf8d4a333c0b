"""Finds the lineages of jobs by their ids and parents, without reading other jobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from tpufleet.model.job.jobs import Job
from tpufleet.policy.job_lineage import JobLineage, job_lineages
from tpufleet.stores.base import JobQuery, Store

T = TypeVar("T")

_BATCH_SIZE = 500  # parameters of one statement
_PAGE_SIZE = 1_000  # jobs in memory at once
_NO_LIMIT = 10_000_000


def lineages_of(store: Store, jobs: Iterable[Job], among: JobQuery) -> list[JobLineage]:
    """The lineages of these jobs, made of jobs that match `among`."""
    known = {job.id: job for job in jobs}
    added: list[Job] = list(known.values())
    among = replace(among, limit=_NO_LIMIT, before=None)
    while added:
        parents = {job.parent for job in added if job.parent is not None} - known.keys()
        found = [
            job
            for batch in batches(sorted(parents))
            for job in store.jobs(replace(among, ids=batch))
        ]
        for batch in batches([job.id for job in added]):
            found += store.jobs(replace(among, parents=batch))
        added = [job for job in found if job.id not in known]
        known |= {job.id: job for job in added}
    return job_lineages(known.values())


def pages(store: Store, query: JobQuery) -> Iterator[list[Job]]:
    """All jobs that match, a thousand at a time."""
    query = replace(query, limit=_PAGE_SIZE)
    while page := store.jobs(query):
        yield page
        query = replace(query, before=page[-1].id)


def batches(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), _BATCH_SIZE):
        yield values[start : start + _BATCH_SIZE]
