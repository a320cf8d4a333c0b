"""Cleaning away jobs that have ended: what they left is deleted, and lists leave them out. What is
known of them, and what they cost, stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tpufleet.errors import BadInput, Conflict, Forbidden
from tpufleet.model.events import Event, EventKind
from tpufleet.model.jobs import ENDED, Job, JobId
from tpufleet.model.views import CleanedJob, CleanOrder, CleanReport
from tpufleet.policy.families import Family, families
from tpufleet.service import queries
from tpufleet.service.commands import Act
from tpufleet.service.leftovers import Leftovers
from tpufleet.stores.base import Change, JobQuery, Store

_ALL = 10_000_000
AT_ONCE = 16  # a bucket takes its time for each


def clean(act: Act, leftovers: Leftovers, order: CleanOrder) -> CleanReport:
    known = families(act.store.jobs(JobQuery(limit=_ALL)))
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
    act.store.commit(Change(events=[_event(act, job, with_checkpoints[job.id]) for job in fresh]))
    with ThreadPoolExecutor(AT_ONCE) as threads:
        drops = threads.map(lambda job_id: leftovers.drop(job_id, with_checkpoints[job_id]), going)
        list(drops)  # tells of the first that failed
    for digest in unused:
        leftovers.snapshots.drop(digest)
    return report


def refuse_cleaned(store: Store, job: Job, so: str) -> None:
    """For those who need what it left."""
    at = store.cleaned_at(job.id)
    if at is not None:
        raise Conflict(f"job {job.id} was cleaned away on {at:%-d %B %Y}, {so}")


def _named(act: Act, order: CleanOrder, known: Sequence[Family]) -> list[Family]:
    family_of = {job.id: family for family in known for job in family.jobs}
    chosen: dict[JobId, Family] = {}
    for ref in order.jobs:
        job = queries.find_job(act.store, ref)
        act.caller.must_own(job.owner, f"job {job.id}")
        # One that was cleaned away already is cleaned again, should anything of it be left.
        family = family_of.get(job.id) or Family((job,))
        if family.live is not None:
            live = family.live
            raise Conflict(
                f"job {live.id} ({live.spec.name}) is {live.state}; once it has ended, it can be "
                "cleaned away with all jobs of its family"
            )
        chosen[family.last.id] = family
    return list(chosen.values())


def _matching(act: Act, order: CleanOrder, known: Sequence[Family]) -> list[Family]:
    if order.everybody and not act.caller.admin:
        raise Forbidden("only an admin cleans away everybody's jobs")
    if wrong := order.states - ENDED:
        raise BadInput(f"states: jobs that are {sorted(wrong)[0]} have not ended")
    before = act.now - order.older_than
    return [
        family for family in known
        if family.may_go(order.states or ENDED, before)
        and (order.everybody or all(job.owner == act.caller.name for job in family.jobs))
    ]  # fmt: skip


def _report(
    leftovers: Leftovers,
    going: Sequence[Job],
    with_checkpoints: Mapping[JobId, bool],
    unused: Sequence[str],
) -> CleanReport:
    with ThreadPoolExecutor(AT_ONCE) as threads:
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


def _event(act: Act, job: Job, with_checkpoints: bool) -> Event:
    gone = "logs, code and checkpoints" if with_checkpoints else "logs and code"
    return Event(
        at=act.now,
        kind=EventKind.JOB,
        state="cleaned",
        words=f"{act.caller.name} cleaned it away, with its {gone}",
        job_id=job.id,
        by=act.caller.name,
    )
