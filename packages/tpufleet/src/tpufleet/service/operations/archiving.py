"""Archiving ended jobs (listings leave them out) and deleting their files. Their records and costs
are kept either way."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from tpufleet.errors import Conflict, FleetError, ProviderError
from tpufleet.model.api_types import (
    JobPage,
    JobSelection,
    PurgedJob,
    PurgeReport,
    PurgeRequest,
)
from tpufleet.model.events import Event
from tpufleet.model.identifiers import check_range
from tpufleet.model.job.jobs import Job, JobId
from tpufleet.service.files.job_files import CHECKPOINTS, FILES, JobFiles
from tpufleet.service.jobs import checkpoint_leases, queries
from tpufleet.service.jobs.commands import CommandContext, require_ended
from tpufleet.service.jobs.lineages import batches
from tpufleet.stores.base import (
    ChangeSet,
    FileKind,
    JobQuery,
    Store,
    checkpoint_reference,
    code_reference,
)

logger = logging.getLogger(__name__)

DeletionError = OSError | ProviderError  # of the disk, or of the bucket
DELETION_ERRORS = (OSError, ProviderError)

MAX_JOBS = 1_000  # of one request: it reads each, under the lease on checkpoint locations
PARALLEL_DELETES = 16  # object storage takes a while for each
# By requests of this server: a second one reports nothing, instead of the same deletion again.
_being_purged: set[JobId] = set()
_WITH_FILES = JobQuery(archived=None, having=FileKind.FILES)


def archive(context: CommandContext, request: JobSelection) -> JobPage:
    """Deletes nothing, and can be undone."""
    jobs = _ended_jobs(context, request.jobs)
    context.store.archive([job.id for job in jobs])
    return JobPage(jobs=tuple(queries.job_rows(context.store, jobs)))


def unarchive(context: CommandContext, request: JobSelection) -> JobPage:
    jobs = [_archived_job(context, ref) for ref in request.jobs]
    for job in jobs:
        context.caller.require_job_owner(job)
    context.store.unarchive([job.id for job in jobs])
    return JobPage(jobs=tuple(queries.job_rows(context.store, jobs)))


def _archived_job(context: CommandContext, ref: str) -> Job:
    """A name means the newest archived job of that name, which one that is listed may hide."""
    named = JobQuery(owner=context.caller.name, name=ref, archived=True, limit=1)
    if found := context.store.jobs(named):
        return found[0]
    return queries.find_job(context.store, ref, context.caller.name)


def purge(context: CommandContext, files: JobFiles, request: PurgeRequest) -> PurgeReport:
    """Delete logs, results and unused code; checkpoints only if requested."""
    if request.dry_run:
        return _plan(context, request).report(files)
    # From here until they are marked, none of them can be resumed.
    with checkpoint_leases.exclusive(context.store, context.now) as lease:
        plan = _plan(context, request)
        if not plan.selected:
            return plan.report(files)
        context.store.commit(ChangeSet(), fence=lease)  # still held
        context.store.mark_files_deleted(list(plan.selected), context.now)
        gone = [job_id for job_id, chosen in plan.with_checkpoints.items() if chosen]
        context.store.mark_deleted(gone, FileKind.CHECKPOINTS)
        _being_purged.update(plan.selected)
    try:
        # Without the lease, which everyone waits for: a folder of checkpoints may be very large.
        report = plan.report(files, skip_errors=True)
        plan = _without_code_in_use(context.store, plan)
        failed = _delete_all(files, plan)
    finally:
        _being_purged.difference_update(plan.selected)
    events = [
        _event(context, plan.selected[row.id], row, plan.unused_code, failed.get(row.id))
        for row in report.jobs
    ]
    context.store.commit(ChangeSet(events=events))
    for job_id, error in failed.items():  # the rest is deleted
        raise _undeletable(job_id, error)
    return report


def _without_code_in_use(store: Store, plan: _PurgePlan) -> _PurgePlan:
    """Jobs may have been submitted with the same code while the files were counted."""
    references = {digest: code_reference(digest) for digest in plan.unused_code}
    users = store.referring_jobs(list(references.values()), with_files=True)
    unused = [
        digest for digest in plan.unused_code if users[references[digest]] <= plan.selected.keys()
    ]
    return replace(plan, unused_code=unused)


def _delete_all(files: JobFiles, plan: _PurgePlan) -> dict[JobId, DeletionError]:
    """The jobs some of whose files are left, with the reason."""
    with ThreadPoolExecutor(PARALLEL_DELETES) as threads:
        errors = threads.map(
            lambda job_id: _delete(files, job_id, plan.with_checkpoints[job_id]), plan.selected
        )
        failed = {
            job_id: error
            for job_id, error in zip(plan.selected, errors, strict=True)
            if error is not None
        }
    for digest in plan.unused_code:
        try:
            files.snapshots.delete(digest)
        except DELETION_ERRORS as error:
            users = [job.id for job in plan.selected.values() if job.snapshot == digest]
            _log_failure("delete", ", ".join(users), error)
            failed |= {job_id: error for job_id in users if job_id not in failed}
    return failed


def _delete(files: JobFiles, job_id: JobId, checkpoints: bool) -> DeletionError | None:
    try:
        files.delete(job_id, (*FILES, *CHECKPOINTS) if checkpoints else FILES)
    except DELETION_ERRORS as error:
        _log_failure("delete", job_id, error)
        return error
    return None


def _log_failure(verb: str, jobs: str, error: DeletionError) -> None:
    logger.warning("cannot %s files of %s: %s", verb, jobs, error)


def deletion_problem(error: DeletionError) -> str:
    """Without the path, which is in the server's log."""
    return error.strerror or "unknown error" if isinstance(error, OSError) else str(error)


def _undeletable(job_id: JobId, error: DeletionError) -> FleetError:
    if isinstance(error, ProviderError):
        return error  # it says whether a retry helps
    return Conflict(
        f"some files of job {job_id} cannot be deleted: {deletion_problem(error)}\n"
        "  next: an admin finds the path in the server's log"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _PurgePlan:
    selected: dict[JobId, Job]
    fresh: list[Job]  # whose files were not deleted before
    with_checkpoints: dict[JobId, bool]
    other_users: dict[JobId, list[JobId]]  # of their checkpoints; not selected
    unused_code: list[str]

    def report(self, files: JobFiles, *, skip_errors: bool = False) -> PurgeReport:
        """Without jobs of which an earlier purge has left nothing. With `skip_errors`, what cannot
        be counted counts as nothing: its deletion will say what is wrong."""

        def measure(kinds: Sequence[str], job: Job) -> int:
            try:
                return files.size(job.id, kinds)
            except DELETION_ERRORS as error:
                if not skip_errors:
                    raise
                _log_failure("count", job.id, error)
                return 0

        code = {digest: files.snapshots.size(digest) for digest in self.unused_code}
        fresh = {job.id for job in self.fresh}
        jobs = list(self.selected.values())
        with ThreadPoolExecutor(PARALLEL_DELETES) as threads:
            sizes = list(threads.map(partial(measure, FILES), jobs))
            checkpoint_sizes = list(threads.map(partial(measure, CHECKPOINTS), jobs))
        rows = tuple(
            PurgedJob(
                id=job.id,
                name=job.spec.name,
                owner=job.owner,
                state=job.state,
                ended_at=job.ended_at,
                size=size,
                checkpoint_size=checkpoint_size,
                with_checkpoints=self.with_checkpoints[job.id],
                checkpoints_used_by=tuple(self.other_users[job.id]),
            )
            for job, size, checkpoint_size in zip(jobs, sizes, checkpoint_sizes, strict=True)
            if job.id in fresh
            or size
            or (checkpoint_size and self.with_checkpoints[job.id])
            or (job.snapshot and code.get(job.snapshot))
        )
        return PurgeReport(jobs=rows, code_size=sum(code.values()))


def _plan(context: CommandContext, request: PurgeRequest) -> _PurgePlan:
    store, caller = context.store, context.caller
    if request.dry_run:  # changes nothing: no entry in the audit log
        caller = replace(caller, on_foreign_access=None)
    chosen = _ended_jobs(replace(context, caller=caller), request.jobs)
    selected = {job.id: job for job in chosen if job.id not in _being_purged}
    # Keep the code and the checkpoints that another job uses: one that was resumed from these, or
    # that names them as its own.
    code = {job.snapshot: code_reference(job.snapshot) for job in selected.values() if job.snapshot}
    users = store.referring_jobs(
        [*code.values(), *map(checkpoint_reference, selected)], with_files=True
    )
    fresh = {
        job.id
        for batch in batches(list(selected))
        for job in store.jobs(replace(_WITH_FILES, ids=batch, limit=len(batch)))
    }
    other_users = {
        job_id: sorted(users[checkpoint_reference(job_id)] - selected.keys()) for job_id in selected
    }
    return _PurgePlan(
        selected=selected,
        fresh=[job for job in selected.values() if job.id in fresh],
        with_checkpoints={
            job_id: request.checkpoints and not others for job_id, others in other_users.items()
        },
        other_users=other_users,
        unused_code=sorted(
            digest for digest, reference in code.items() if users[reference] <= selected.keys()
        ),
    )


def require_files(store: Store, job: Job, consequence: str) -> None:
    """Reject a request that needs the files of this job."""
    at = store.files_deleted_at(job.id)
    if at is not None:
        raise Conflict(f"the files of job {job.id} were deleted on {at:%Y-%m-%d}, {consequence}")


def _ended_jobs(context: CommandContext, refs: Sequence[str]) -> list[Job]:
    """Oldest first. Also those whose files were deleted, in case some of them are left."""
    check_range("number of jobs", len(refs), 1, MAX_JOBS)
    named = {}
    for ref in refs:
        job = queries.find_job(context.store, ref, context.caller.name)
        context.caller.require_job_owner(job)
        require_ended(job, "archived or purged")
        named[job.id] = job
    return sorted(named.values(), key=lambda job: (job.submitted_at, job.id))


def _event(
    context: CommandContext,
    job: Job,
    row: PurgedJob,
    unused_code: Sequence[str],
    error: DeletionError | None,
) -> Event:
    parts = ["logs", "results"]
    if job.snapshot in unused_code:
        parts.append("code")
    if row.with_checkpoints and row.checkpoint_size:
        parts.append("checkpoints")
    outcome = f"deleted {', '.join(parts[:-1])} and {parts[-1]}"
    if error is not None:
        option = "--checkpoints " if row.with_checkpoints else ""
        outcome = (
            f"some files could not be deleted: {deletion_problem(error)}; "
            f"`tpu archive purge {option}{job.id}` deletes what is left"
        )
    state = "purged" if error is None else "purge_failed"
    return context.job_event(job.id, state, f"purged by {context.caller.name}: {outcome}")
