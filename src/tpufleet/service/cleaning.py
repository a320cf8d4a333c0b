"""Cleaning away jobs that have ended: what they left is deleted, and lists leave them out. What is
known of them, and what they cost, stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tpufleet.errors import BadInput, Conflict, Forbidden
from tpufleet.model.api_types import CleanedJob, CleanReport, CleanRequest
from tpufleet.model.events import Event, EventKind
from tpufleet.model.jobs import ENDED_STATES, Job, JobId
from tpufleet.policy.job_lineage import JobLineage, job_lineages
from tpufleet.service import queries
from tpufleet.service.commands import CommandContext
from tpufleet.service.files.job_files import JobFiles
from tpufleet.stores.base import ChangeSet, JobQuery, Store

_ALL = 10_000_000
PARALLEL_DELETES = 16  # a bucket takes its time for each


def clean(act: CommandContext, leftovers: JobFiles, order: CleanRequest) -> CleanReport:
    known = job_lineages(act.store.jobs(JobQuery(limit=_ALL)))
    chosen = _named(act, order, known) if order.jobs else _matching(act, order, known)
    going = {job.id: job for family in chosen for job in family.jobs}
    fresh = [job for family in known for job in family.jobs if job.id in going]
    staying = [job for family in known for job in family.jobs if job.id not in going]
    # Not those that another job named as its own.
    named = {part for job in staying for part in job.checkpoint.split("/")}
    with_checkpoints = {job_id: order.checkpoints and job_id not in named for job_id in going}
    used = {job.snapshot for job in staying}
    unused = sorted({job.snapshot for job in going.values() if job.snapshot} - used)
    report = _report(leftovers, list(going.values()), with_checkpoints, unused)
    if order.dry_run or not going:
        return report
    # First of all, so that nobody resumes one of them meanwhile.
    act.store.clean(list(going), act.now)
    act.store.commit(
        ChangeSet(events=[_event(act, job, with_checkpoints[job.id]) for job in fresh])
    )
    with ThreadPoolExecutor(PARALLEL_DELETES) as threads:
        drops = threads.map(
            lambda job_id: leftovers.delete(job_id, with_checkpoints[job_id]), going
        )
        list(drops)  # tells of the first that failed
    for digest in unused:
        leftovers.snapshots.delete(digest)
    return report


def require_not_cleaned(store: Store, job: Job, consequence: str) -> None:
    """For those who need what it left."""
    at = store.cleaned_at(job.id)
    if at is not None:
        raise Conflict(f"job {job.id} was cleaned away on {at:%-d %B %Y}, {consequence}")


def _named(
    act: CommandContext, order: CleanRequest, known: Sequence[JobLineage]
) -> list[JobLineage]:
    family_of = {job.id: family for family in known for job in family.jobs}
    chosen: dict[JobId, JobLineage] = {}
    for ref in order.jobs:
        job = queries.find_job(act.store, ref)
        act.caller.require_owner(job.owner, f"job {job.id}")
        # One that was cleaned away already is cleaned again, should anything of it be left.
        family = family_of.get(job.id) or JobLineage((job,))
        if family.live is not None:
            live = family.live
            raise Conflict(
                f"job {live.id} ({live.spec.name}) is {live.state}; once it has ended, it can be "
                "cleaned away with all jobs of its family"
            )
        chosen[family.last.id] = family
    return list(chosen.values())


def _matching(
    act: CommandContext, order: CleanRequest, known: Sequence[JobLineage]
) -> list[JobLineage]:
    if order.all_owners and not act.caller.is_admin:
        raise Forbidden("only an admin cleans away everybody's jobs")
    if wrong := order.states - ENDED_STATES:
        raise BadInput(f"states: jobs that are {sorted(wrong)[0]} have not ended")
    before = act.now - order.older_than
    return [
        family for family in known
        if family.can_be_cleaned(order.states or ENDED_STATES, before)
        and (order.all_owners or all(job.owner == act.caller.name for job in family.jobs))
    ]  # fmt: skip


def _report(
    leftovers: JobFiles,
    going: Sequence[Job],
    with_checkpoints: Mapping[JobId, bool],
    unused: Sequence[str],
) -> CleanReport:
    with ThreadPoolExecutor(PARALLEL_DELETES) as threads:
        sizes = list(
            threads.map(lambda job: leftovers.size(job.id, with_checkpoints[job.id]), going)
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
        for job, size in zip(going, sizes, strict=True)
    )
    code = sum(leftovers.snapshots.size(digest) for digest in unused)
    return CleanReport(jobs=rows, size=code + sum(row.size for row in rows))


def _event(act: CommandContext, job: Job, with_checkpoints: bool) -> Event:
    gone = "logs, code and checkpoints" if with_checkpoints else "logs and code"
    return Event(
        at=act.now,
        kind=EventKind.JOB,
        state="cleaned",
        message=f"{act.caller.name} cleaned it away, with its {gone}",
        job_id=job.id,
        by=act.caller.name,
    )
