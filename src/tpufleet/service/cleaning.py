"""Cleaning ended jobs: their files are deleted and listings leave them out. Their records and costs
are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tpufleet.errors import BadInput, Conflict, Forbidden
from tpufleet.model.api_types import CleanedJob, CleanReport, CleanRequest
from tpufleet.model.events import Event, EventKind
from tpufleet.model.jobs import ENDED_STATES, Job, JobId
from tpufleet.policy.job_lineage import JobLineage, job_lineages
from tpufleet.service import checkpoint_leases, queries
from tpufleet.service.commands import CommandContext
from tpufleet.service.files.job_files import JobFiles
from tpufleet.stores.base import ChangeSet, JobQuery, Store

_NO_LIMIT = 10_000_000
PARALLEL_DELETES = 16  # object storage takes a while for each


def clean(context: CommandContext, files: JobFiles, request: CleanRequest) -> CleanReport:
    # From here until they are marked, none of them can be resumed.
    with checkpoint_leases.exclusive(context.store, context.now) as lease:
        selection = _select(context, request)
        selected, with_checkpoints = selection.jobs, selection.with_checkpoints
        report = _report(files, list(selected.values()), with_checkpoints, selection.unused_code)
        if request.dry_run or not selected:
            return report
        context.store.commit(
            ChangeSet(
                events=[_event(context, job, with_checkpoints[job.id]) for job in selection.fresh]
            ),
            fence=lease,
        )
        context.store.clean(list(selected), context.now)
    with ThreadPoolExecutor(PARALLEL_DELETES) as threads:
        deletions = threads.map(
            lambda job_id: files.delete(job_id, with_checkpoints[job_id]), selected
        )
        list(deletions)  # raises the first error
    for digest in selection.unused_code:
        files.snapshots.delete(digest)
    return report


@dataclass(frozen=True, kw_only=True, slots=True)
class _Selection:
    jobs: Mapping[JobId, Job]
    fresh: Sequence[Job]  # those not cleaned before
    with_checkpoints: Mapping[JobId, bool]
    unused_code: Sequence[str]  # digests of snapshots


def _select(context: CommandContext, request: CleanRequest) -> _Selection:
    known = job_lineages(context.store.jobs(JobQuery(limit=_NO_LIMIT)))
    chosen = _named(context, request, known) if request.jobs else _matching(context, request, known)
    selected = {job.id: job for lineage in chosen for job in lineage.jobs}
    kept = [job for lineage in known for job in lineage.jobs if job.id not in selected]
    # Keep the checkpoints that another job names as its own.
    named = {part for job in kept for part in job.checkpoint.split("/")}
    used = {job.snapshot for job in kept}
    return _Selection(
        jobs=selected,
        fresh=[job for lineage in known for job in lineage.jobs if job.id in selected],
        with_checkpoints={
            job_id: request.checkpoints and job_id not in named for job_id in selected
        },
        unused_code=sorted({job.snapshot for job in selected.values() if job.snapshot} - used),
    )


def code_is_needed(store: Store, job: Job) -> bool:
    """Whether a live job, or a job that another user may resume, has the code of this job."""
    return any(
        other.snapshot == job.snapshot and (other.owner != job.owner or not other.ended)
        for other in store.jobs(JobQuery(limit=_NO_LIMIT))
        if other.id != job.id
    )


def require_not_cleaned(store: Store, job: Job, consequence: str) -> None:
    """Reject a request that needs the files of this job."""
    at = store.cleaned_at(job.id)
    if at is not None:
        raise Conflict(f"job {job.id} was cleaned on {at:%Y-%m-%d}, {consequence}")


def _named(
    context: CommandContext, request: CleanRequest, known: Sequence[JobLineage]
) -> list[JobLineage]:
    lineage_of = {job.id: lineage for lineage in known for job in lineage.jobs}
    chosen: dict[JobId, JobLineage] = {}
    for ref in request.jobs:
        job = queries.find_job(context.store, ref)
        context.caller.require_owner(job.owner, f"job {job.id}")
        # A job that was cleaned before is cleaned again, in case some of its files are left.
        lineage = lineage_of.get(job.id) or JobLineage((job,))
        if lineage.live is not None:
            live = lineage.live
            raise Conflict(
                f"job {live.id} ({live.spec.name}) is {live.state}; it can be cleaned, with the "
                f"jobs it was resumed or rerun from, after it has ended: `tpu cancel {live.id}`"
            )
        chosen[lineage.last.id] = lineage
    return list(chosen.values())


def _matching(
    context: CommandContext, request: CleanRequest, known: Sequence[JobLineage]
) -> list[JobLineage]:
    if request.all_owners and not context.caller.is_admin:
        raise Forbidden("cleaning the jobs of all users requires the admin role")
    if wrong := request.states - ENDED_STATES:
        raise BadInput(f"states: {sorted(wrong)[0]} is not an end state")
    before = context.now - request.older_than
    return [
        lineage for lineage in known
        if lineage.can_be_cleaned(request.states or ENDED_STATES, before)
        and (request.all_owners or all(job.owner == context.caller.name for job in lineage.jobs))
    ]  # fmt: skip


def _report(
    files: JobFiles,
    selected: Sequence[Job],
    with_checkpoints: Mapping[JobId, bool],
    unused: Sequence[str],
) -> CleanReport:
    with ThreadPoolExecutor(PARALLEL_DELETES) as threads:
        sizes = list(
            threads.map(lambda job: files.size(job.id, with_checkpoints[job.id]), selected)
        )
    rows = tuple(
        CleanedJob(
            id=job.id,
            name=job.spec.name,
            owner=job.owner,
            state=job.state,
            ended_at=job.ended_at,
            size=size,
        )
        for job, size in zip(selected, sizes, strict=True)
    )
    code = sum(files.snapshots.size(digest) for digest in unused)
    return CleanReport(jobs=rows, size=code + sum(row.size for row in rows))


def _event(context: CommandContext, job: Job, with_checkpoints: bool) -> Event:
    deleted = "logs, code and checkpoints" if with_checkpoints else "logs and code"
    return Event(
        at=context.now,
        kind=EventKind.JOB,
        state="cleaned",
        message=f"cleaned by {context.caller.name}: deleted {deleted}",
        job_id=job.id,
        by=context.caller.name,
    )
