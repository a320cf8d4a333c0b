"""Archiving ended jobs (listings leave them out) and deleting their files. Their records and costs
are kept either way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tpufleet.errors import BadInput, Conflict, Forbidden
from tpufleet.model.api_types import (
    ArchiveRequest,
    EndedJobSelection,
    JobPage,
    PurgedJob,
    PurgeReport,
    PurgeRequest,
    UnarchiveRequest,
)
from tpufleet.model.events import Event, EventKind
from tpufleet.model.jobs import ENDED_STATES, Job, JobId
from tpufleet.policy.job_lineage import JobLineage, job_lineages
from tpufleet.service import checkpoint_leases, queries
from tpufleet.service.commands import CommandContext
from tpufleet.service.files.job_files import JobFiles
from tpufleet.stores.base import ChangeSet, JobQuery, Store

_NO_LIMIT = 10_000_000
PARALLEL_DELETES = 16  # object storage takes a while for each


def archive(context: CommandContext, request: ArchiveRequest) -> JobPage:
    """Deletes nothing, and can be undone."""
    known = job_lineages(context.store.jobs(JobQuery(limit=_NO_LIMIT)))
    selected = [job for lineage in _select(context, request, known) for job in lineage.jobs]
    if not request.dry_run:
        context.store.archive([job.id for job in selected], context.now)
    return JobPage(jobs=tuple(queries.job_rows(context.store, selected)))


def unarchive(context: CommandContext, request: UnarchiveRequest) -> JobPage:
    jobs = [queries.find_job(context.store, ref, context.caller.name) for ref in request.jobs]
    for job in jobs:
        context.caller.require_owner(job.owner, f"job {job.id}")
    context.store.unarchive([job.id for job in jobs])
    return JobPage(jobs=tuple(queries.job_rows(context.store, jobs)))


def purge(context: CommandContext, files: JobFiles, request: PurgeRequest) -> PurgeReport:
    """Delete logs, results and unused code; checkpoints only if requested."""
    # From here until they are marked, none of them can be resumed.
    with checkpoint_leases.exclusive(context.store, context.now) as lease:
        known = job_lineages(
            context.store.jobs(JobQuery(archived=None, files_deleted=False, limit=_NO_LIMIT))
        )
        chosen = _select(context, request, known)
        selected = {job.id: job for lineage in chosen for job in lineage.jobs}
        fresh = [job for lineage in known for job in lineage.jobs if job.id in selected]
        kept = [job for lineage in known for job in lineage.jobs if job.id not in selected]
        # Keep the checkpoints that another job names as its own.
        named = {part for job in kept for part in job.checkpoint.split("/")}
        with_checkpoints = {
            job_id: request.checkpoints and job_id not in named for job_id in selected
        }
        used = {job.snapshot for job in kept}
        unused = sorted({job.snapshot for job in selected.values() if job.snapshot} - used)
        report = _report(files, list(selected.values()), with_checkpoints, unused)
        if request.dry_run or not selected:
            return report
        context.store.commit(
            ChangeSet(events=[_event(context, job, with_checkpoints[job.id]) for job in fresh]),
            fence=lease,
        )
        context.store.mark_files_deleted(list(selected), context.now)
    with ThreadPoolExecutor(PARALLEL_DELETES) as threads:
        deletions = threads.map(
            lambda job_id: files.delete(job_id, with_checkpoints[job_id]), selected
        )
        list(deletions)  # raises the first error
    for digest in unused:
        files.snapshots.delete(digest)
    return report


def code_is_needed(store: Store, job: Job) -> bool:
    """Whether a live job, or a job that another user may resume, has the code of this job."""
    return any(
        other.snapshot == job.snapshot and (other.owner != job.owner or not other.ended)
        for other in store.jobs(JobQuery(archived=None, limit=_NO_LIMIT))
        if other.id != job.id
    )


def require_files(store: Store, job: Job, consequence: str) -> None:
    """Reject a request that needs the files of this job."""
    at = store.files_deleted_at(job.id)
    if at is not None:
        raise Conflict(f"the files of job {job.id} were deleted on {at:%Y-%m-%d}, {consequence}")


def _select(
    context: CommandContext, request: EndedJobSelection, known: Sequence[JobLineage]
) -> list[JobLineage]:
    return _named(context, request, known) if request.jobs else _matching(context, request, known)


def _named(
    context: CommandContext, request: EndedJobSelection, known: Sequence[JobLineage]
) -> list[JobLineage]:
    lineage_of = {job.id: lineage for lineage in known for job in lineage.jobs}
    chosen: dict[JobId, JobLineage] = {}
    for ref in request.jobs:
        job = queries.find_job(context.store, ref, context.caller.name)
        context.caller.require_owner(job.owner, f"job {job.id}")
        # A job whose files were deleted is selected again, in case some of them are left.
        lineage = lineage_of.get(job.id) or JobLineage((job,))
        if lineage.live is not None:
            live = lineage.live
            raise Conflict(
                f"job {live.id} ({live.spec.name}) is {live.state}; it can be archived or purged, "
                "with the jobs it was resumed or rerun from, after it has ended: "
                f"`tpu cancel {live.id}`"
            )
        chosen[lineage.last.id] = lineage
    return list(chosen.values())


def _matching(
    context: CommandContext, request: EndedJobSelection, known: Sequence[JobLineage]
) -> list[JobLineage]:
    if request.all_owners and not context.caller.is_admin:
        raise Forbidden("selecting the jobs of all users requires the admin role")
    if wrong := request.states - ENDED_STATES:
        raise BadInput(f"states: {sorted(wrong)[0]} is not an end state")
    before = context.now - request.older_than
    return [
        lineage for lineage in known
        if lineage.ended_by(request.states or ENDED_STATES, before)
        and (request.all_owners or all(job.owner == context.caller.name for job in lineage.jobs))
    ]  # fmt: skip


def _report(
    files: JobFiles,
    selected: Sequence[Job],
    with_checkpoints: Mapping[JobId, bool],
    unused: Sequence[str],
) -> PurgeReport:
    with ThreadPoolExecutor(PARALLEL_DELETES) as threads:
        sizes = list(threads.map(lambda job: files.size(job.id), selected))
        checkpoint_sizes = list(threads.map(lambda job: files.checkpoint_size(job.id), selected))
    rows = tuple(
        PurgedJob(
            id=job.id,
            name=job.spec.name,
            owner=job.owner,
            state=job.state,
            ended_at=job.ended_at,
            size=size,
            checkpoint_size=checkpoint_size,
            with_checkpoints=with_checkpoints[job.id],
        )
        for job, size, checkpoint_size in zip(selected, sizes, checkpoint_sizes, strict=True)
    )
    code = sum(files.snapshots.size(digest) for digest in unused)
    return PurgeReport(jobs=rows, code_size=code)


def _event(context: CommandContext, job: Job, with_checkpoints: bool) -> Event:
    deleted = "logs, code and checkpoints" if with_checkpoints else "logs and code"
    return Event(
        at=context.now,
        kind=EventKind.JOB,
        state="purged",
        message=f"purged by {context.caller.name}: deleted {deleted}",
        job_id=job.id,
        by=context.caller.name,
    )
