"""Archiving ended jobs (listings leave them out) and deleting their files. Their records and costs
are kept either way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta

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
from tpufleet.model.jobs import ENDED_STATES, Job, JobId, JobState
from tpufleet.policy.job_lineage import JobLineage
from tpufleet.service import checkpoint_leases, queries
from tpufleet.service.commands import CommandContext
from tpufleet.service.files.job_files import JobFiles
from tpufleet.service.lineages import batches, lineages_of, pages
from tpufleet.stores.base import (
    ChangeSet,
    FileKind,
    JobQuery,
    Store,
    checkpoint_reference,
    code_reference,
)

MAX_SELECTED = 10_000  # jobs of one request; another one selects the next
MAX_PURGED = 1_000  # under the lease on checkpoint locations
PARALLEL_DELETES = 16  # object storage takes a while for each
LIVE_STATES = frozenset(JobState) - ENDED_STATES
_MOMENT = timedelta(microseconds=1)  # a job may end at the moment of its submission
_LISTED = JobQuery()
_WITH_FILES = JobQuery(archived=None, having=FileKind.FILES)


def archive(context: CommandContext, request: ArchiveRequest) -> JobPage:
    """Deletes nothing, and can be undone."""
    lineages = _select(context, request, _LISTED, MAX_SELECTED)
    selected = [job for lineage in lineages for job in lineage.jobs]
    if not request.dry_run:
        context.store.archive([job.id for job in selected], context.now)
    more = selected[-1].id if len(selected) >= MAX_SELECTED else None
    return JobPage(jobs=tuple(queries.job_rows(context.store, selected)), next=more)


def unarchive(context: CommandContext, request: UnarchiveRequest) -> JobPage:
    jobs = [queries.find_job(context.store, ref, context.caller.name) for ref in request.jobs]
    for job in jobs:
        context.caller.require_owner(job.owner, f"job {job.id}")
    context.store.unarchive([job.id for job in jobs])
    return JobPage(jobs=tuple(queries.job_rows(context.store, jobs)))


def purge(context: CommandContext, files: JobFiles, request: PurgeRequest) -> PurgeReport:
    """Delete logs, results and unused code; checkpoints only if requested."""
    if request.dry_run:  # may list everything
        return _plan(context, request, MAX_SELECTED).report(files)
    if not (request.jobs or request.states or request.older_than > timedelta(0)):
        raise BadInput(
            "select what to delete: jobs, states or older_than\n"
            '  next: name them ("jobs": ["train"]), or list all with "dry_run": true first'
        )
    # From here until they are marked, none of them can be resumed.
    with checkpoint_leases.exclusive(context.store, context.now) as lease:
        plan = _plan(context, request, MAX_PURGED)
        report = plan.report(files)
        if not plan.selected:
            return report
        events = [_event(context, job, plan.with_checkpoints[job.id]) for job in plan.fresh]
        context.store.commit(ChangeSet(events=events), fence=lease)
        context.store.mark_files_deleted(list(plan.selected), context.now)
        gone = [job_id for job_id, chosen in plan.with_checkpoints.items() if chosen]
        context.store.mark_deleted(gone, FileKind.CHECKPOINTS)
    with ThreadPoolExecutor(PARALLEL_DELETES) as threads:
        deletions = threads.map(
            lambda job_id: files.delete(job_id, plan.with_checkpoints[job_id]), plan.selected
        )
        list(deletions)  # raises the first error
    for digest in plan.unused_code:
        files.snapshots.delete(digest)
    return report


@dataclass(frozen=True, kw_only=True, slots=True)
class _PurgePlan:
    selected: dict[JobId, Job]
    fresh: list[Job]  # whose files were not deleted before
    with_checkpoints: dict[JobId, bool]
    unused_code: list[str]
    more: bool

    def report(self, files: JobFiles) -> PurgeReport:
        jobs = list(self.selected.values())
        report = _report(files, jobs, self.with_checkpoints, self.unused_code)
        return replace(report, more=self.more)


def _plan(context: CommandContext, request: PurgeRequest, limit: int) -> _PurgePlan:
    store = context.store
    chosen = _select(context, request, _WITH_FILES, limit)
    selected = {job.id: job for lineage in chosen for job in lineage.jobs}
    # Keep the code and the checkpoints that another job names as its own.
    code = {job.snapshot: code_reference(job.snapshot) for job in selected.values() if job.snapshot}
    users = store.referring_jobs(
        [*code.values(), *map(checkpoint_reference, selected)], with_files=True
    )
    fresh = {
        job.id
        for batch in batches(list(selected))
        for job in store.jobs(replace(_WITH_FILES, ids=batch, limit=len(batch)))
    }
    return _PurgePlan(
        selected=selected,
        fresh=[job for job in selected.values() if job.id in fresh],
        with_checkpoints={
            job_id: request.checkpoints and users[checkpoint_reference(job_id)] <= selected.keys()
            for job_id in selected
        },
        unused_code=sorted(
            digest for digest, reference in code.items() if users[reference] <= selected.keys()
        ),
        more=not request.jobs and len(selected) >= limit,
    )


def code_is_needed(store: Store, job: Job) -> bool:
    """Whether a live job, or a job that another user may resume, has the code of this job."""
    same_code = JobQuery(archived=None, snapshot=job.snapshot, limit=2)
    live = store.jobs(replace(same_code, states=LIVE_STATES))
    others = store.jobs(replace(same_code, other_owner_than=job.owner))
    return any(other.id != job.id for other in (*live, *others))


def require_files(store: Store, job: Job, consequence: str) -> None:
    """Reject a request that needs the files of this job."""
    at = store.files_deleted_at(job.id)
    if at is not None:
        raise Conflict(f"the files of job {job.id} were deleted on {at:%Y-%m-%d}, {consequence}")


def _select(
    context: CommandContext, request: EndedJobSelection, among: JobQuery, limit: int
) -> list[JobLineage]:
    if request.jobs:
        return _named(context, request, among)
    selected: dict[JobId, JobLineage] = {}
    count = 0
    for lineage in _matching(context, request, among):
        if lineage.last.id not in selected:
            selected[lineage.last.id] = lineage
            count += len(lineage.jobs)
        if count >= limit:
            break
    return sorted(selected.values(), key=lambda each: (each.jobs[0].submitted_at, each.jobs[0].id))


def _named(
    context: CommandContext, request: EndedJobSelection, among: JobQuery
) -> list[JobLineage]:
    named, caller = {}, context.caller
    if request.dry_run:  # changes nothing: no entry in the audit log
        caller = replace(caller, on_foreign_access=None)
    for ref in request.jobs:
        job = queries.find_job(context.store, ref, context.caller.name)
        caller.require_owner(job.owner, f"job {job.id}")
        named[job.id] = job
    matching = [
        job
        for batch in batches(list(named))
        for job in context.store.jobs(replace(among, ids=batch, limit=len(batch)))
    ]
    chosen = lineages_of(context.store, matching, among)
    # A job whose files were deleted is selected again, in case some of them are left.
    known = {job.id for lineage in chosen for job in lineage.jobs}
    chosen += [JobLineage((job,)) for job in named.values() if job.id not in known]
    for live in (lineage.live for lineage in chosen):
        if live is not None:
            raise Conflict(
                f"job {live.id} ({live.spec.name}) is {live.state}; it can be archived or purged, "
                "with the jobs it was resumed or rerun from, after it has ended: "
                f"`tpu cancel {live.id}`"
            )
    return chosen


def _matching(
    context: CommandContext, request: EndedJobSelection, among: JobQuery
) -> Iterator[JobLineage]:
    """Some of them more than once."""
    if request.all_owners and not context.caller.is_admin:
        raise Forbidden("selecting the jobs of all users requires the admin role")
    if request.all_owners and not request.dry_run:
        context.caller.record_foreign_access("all users", "jobs of all users")
    if wrong := request.states - ENDED_STATES:
        raise BadInput(f"states: {sorted(wrong)[0]} is not an end state")
    before, owner = context.now - request.older_than, context.caller.name
    states = request.states or ENDED_STATES
    candidates = replace(
        among,
        states=states,
        owner=None if request.all_owners else owner,
        submitted_before=before + _MOMENT,
    )
    for page in pages(context.store, candidates):
        for lineage in lineages_of(context.store, page, among):
            own = request.all_owners or all(job.owner == owner for job in lineage.jobs)
            if own and lineage.ended_by(states, before):
                yield lineage


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
