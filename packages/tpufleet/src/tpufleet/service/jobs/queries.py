"""Read-only queries: rows, details, events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import zip_longest

from tpufleet.errors import Conflict, NotFound, not_found
from tpufleet.model.api_types import (
    EventPage,
    HostRow,
    JobDetail,
    JobPage,
    JobRow,
    SliceRow,
)
from tpufleet.model.fleet.hosts import HostId, HostLiveness, Progress, host_id
from tpufleet.model.fleet.slices import SliceId, TpuSlice
from tpufleet.model.job.attempts import Attempt, AttemptId
from tpufleet.model.job.jobs import Job, JobId, default_name, is_generated_id
from tpufleet.model.tpu import type_lookup
from tpufleet.policy.accounting import goodput
from tpufleet.policy.recovery import liveness, recovery_time
from tpufleet.stores.base import EventQuery, JobQuery, Store

LAST = "@last"
BY_ID = "@"  # before an id: that job, whatever others are named
_MAX_CACHED_ROWS = 50_000  # of about 0.5 kB
_RECENT_JOBS = 1000  # of one user, searched for default names


def find_job(store: Store, ref: str, caller: str, *, owner: str | None = None) -> Job:
    """By id; `@last`; `@ID`; `OWNER/NAME` (in a path `OWNER:NAME`); name; or the beginning of an
    id. A name means the caller's newest job of that name, else the newest of the one user who has
    any.
    Users choose ids too: the id of another user's job does not hide a job of that name.
    With `owner`, errors name no jobs of others."""
    visible = JobQuery(owner=owner)
    exact = ref.startswith(BY_ID) and ref != LAST
    job = store.job(JobId(ref.removeprefix(BY_ID) if exact else ref))
    if job is not None and job.owner != caller and not exact:
        job = _unless_a_name(store, job, caller, visible)
    if job is None and ref == LAST:
        job = _newest(store, JobQuery(owner=caller, limit=1))
        if job is None:
            raise NotFound(f"{LAST}: {caller} has no jobs; list all with `tpu jobs --all-users`")
    if job is None:
        named, separator, name = ref.replace(":", "/", 1).partition("/")
        job = _by_name(store, name, named) if separator else _by_name(store, ref, caller)
    job = job or _of_another_user(store, ref, visible) or _by_id_prefix(store, ref, visible)
    if job is not None:
        return job
    known = {job.spec.name for job in store.jobs(replace(visible, limit=200))}
    shown = ref.replace(":", "/", 1)  # as people write it
    raise not_found("job", shown, "jobs", known)


def _unless_a_name(store: Store, job: Job, caller: str, visible: JobQuery) -> Job | None:
    """A job of another user, found by its id. None if that is the name of a job of the caller."""
    if store.jobs(JobQuery(owner=caller, name=job.id, archived=None, limit=1)):
        return None
    if is_generated_id(job.id):
        return job
    if _by_name(store, job.id, caller) is not None:
        return None
    others = replace(visible, name=job.id, archived=None, other_owner_than=job.owner, limit=50)
    if owners := {each.owner for each in store.jobs(others)}:
        refs = sorted(f"{owner}/{job.id}" for owner in owners)
        raise Conflict(
            f"{job.id!r} is the id of a job of {job.owner}, and a name of other jobs; use one of "
            f"{', '.join((*refs, f'{BY_ID}{job.id}'))}"
        )
    return job


def _newest(store: Store, query: JobQuery) -> Job | None:
    """Archived jobs are found too, but after all others."""
    for archived in (False, True):
        if found := store.jobs(replace(query, archived=archived, limit=1)):
            return found[0]
    return None


def _by_name(store: Store, name: str, owner: str) -> Job | None:
    if named := _newest(store, JobQuery(owner=owner, name=name)):
        return named
    recent = store.jobs(JobQuery(owner=owner, limit=_RECENT_JOBS))
    similar = (job for job in recent if job.spec.name.startswith(f"{name}-"))
    return next((job for job in similar if default_base(store, job) == name), None)


def default_base(store: Store, job: Job) -> str | None:
    """`train` of a job that was named `train-k3f9` after its command, or whose ancestor was; None
    if a user chose its name."""
    base = job.spec.name.rpartition("-")[0]
    ancestor: Job | None = job if base else None
    while ancestor is not None:
        if job.spec.name == default_name(base, ancestor.id):
            return base
        ancestor = store.job(ancestor.parent) if ancestor.parent is not None else None
    return None


def _of_another_user(store: Store, name: str, visible: JobQuery) -> Job | None:
    for archived in (False, True):
        named = store.jobs(replace(visible, name=name, archived=archived, limit=50))
        if len({job.owner for job in named}) > 1:
            owners = ", ".join(sorted({f"{job.owner}/{name}" for job in named}))
            raise Conflict(f"several users have a job named {name!r}; use one of {owners}")
        if named:
            return named[0]
    return None


def _by_id_prefix(store: Store, prefix: str, visible: JobQuery) -> Job | None:
    matching = [
        job
        for job in store.jobs_like(prefix, limit=50)
        if prefix and job.id.startswith(prefix)
        if visible.owner in (None, job.owner)
    ]
    if len(matching) > 1:
        raise Conflict(_ambiguous(f"have an id that starts with {prefix!r}", matching))
    return matching[0] if matching else None


class EndedJobRows:
    """Cached rows of ended jobs, which are the bulk of a long listing. They only change by an edit,
    and then the store returns another object."""

    def __init__(self) -> None:
        self._rows: dict[JobId, tuple[Job, JobRow]] = {}

    def rows(self, store: Store, jobs: Sequence[Job]) -> list[JobRow]:
        """Like `job_rows`, which is only called for jobs that are not cached."""
        known = self._rows
        fresh = [job for job in jobs if job.id not in known or known[job.id][0] is not job]
        rows = {row.id: row for row in job_rows(store, fresh)}
        ordered = [rows.get(job.id) or known[job.id][1] for job in jobs]
        if len(known) + len(fresh) > _MAX_CACHED_ROWS:
            known = self._rows = {}
        known.update((job.id, (job, rows[job.id])) for job in fresh if job.ended)
        return ordered


def job_page(store: Store, query: JobQuery, ended: EndedJobRows) -> JobPage:
    jobs = store.jobs(query)
    more = len(jobs) >= query.limit and bool(jobs)
    return JobPage(jobs=tuple(ended.rows(store, jobs)), next=jobs[-1].id if more else None)


def job_rows(store: Store, jobs: Sequence[Job]) -> list[JobRow]:
    """One query for all attempts, one for all liveness."""
    newest = store.newest_attempts([job.id for job in jobs])
    firsts = {
        attempt.job_id: host_id(attempt.slices[0], 0)
        for attempt in newest.values()
        if attempt.live and attempt.slices
    }
    liveness_rows = store.last_heartbeats(list(firsts.values())) if firsts else {}
    rows = []
    for job in jobs:
        attempt = newest.get(job.id)
        first = liveness_rows.get(firsts.get(job.id, HostId("")))
        rows.append(job_row(job, attempt, _progress(attempt, first)))
    return rows


def _progress(attempt: Attempt | None, seen: HostLiveness | None) -> Progress | None:
    """What the host reported, if it was about this attempt; after its end, the last report."""
    if attempt is None:
        return None
    if not attempt.live:
        return _last_progress(attempt)
    progress = seen.progress if seen is not None and seen.attempt_id == attempt.id else None
    if attempt.running_at is None or (progress is not None and progress.output_at is not None):
        return progress
    return replace(progress or Progress(), output_at=attempt.running_at)


def _last_progress(attempt: Attempt) -> Progress | None:
    progress = Progress(
        step=attempt.last_step,
        total=attempt.total_steps,
        checkpoint_step=attempt.checkpoint_step,
        at=attempt.progress_at,
        message=attempt.progress_message,
        metrics=attempt.metrics,
    )
    return progress if progress != Progress() else None


def attempts_with_steps(store: Store, attempts: Sequence[Attempt]) -> frozenset[AttemptId]:
    """The live attempts of which process 0 has reported a step."""
    firsts = {
        attempt.id: host_id(attempt.slices[0], 0)
        for attempt in attempts
        if attempt.live and attempt.slices
    }
    liveness_rows = store.last_heartbeats(list(firsts.values()))
    return frozenset(
        attempt_id
        for attempt_id, host in firsts.items()
        if (seen := liveness_rows.get(host)) is not None
        and seen.attempt_id == attempt_id
        and seen.progress is not None
        and seen.progress.step is not None
    )


def job_row(job: Job, newest: Attempt | None, progress: Progress | None) -> JobRow:
    spec = job.spec
    return JobRow(
        id=job.id,
        name=spec.name,
        owner=job.owner,
        state=job.state,
        reason=job.reason,
        accelerator=spec.accelerator,
        slices=spec.max_slices,
        pool=spec.pool,
        priority=spec.priority,
        tags=spec.tags,
        submitted_at=job.submitted_at,
        ended_at=job.ended_at,
        attempts=0 if newest is None else newest.number + 1,
        progress=progress,
        parent=job.parent,
        notes=spec.notes,
        held_by=job.held_by,
    )


def job_detail(store: Store, job: Job, now: datetime) -> JobDetail:
    attempts = store.attempts(job.id)
    children = store.jobs(JobQuery(parent=job.id, archived=None, limit=1000))
    live = attempts[-1] if attempts and attempts[-1].live else None
    row = job_rows(store, [job])[0]
    return JobDetail(
        job=job,
        row=row,
        attempts=tuple(_with_checkpoints(attempts, row.progress)),
        slices=tuple(slice_rows(store, store.slices(job_id=job.id), now)),
        hosts=tuple(host_rows(store, live)) if live is not None else (),
        children=tuple(job_rows(store, children)[::-1]),
        processes=type_lookup.find(job.spec.accelerator).hosts * job.spec.max_slices,
        files_deleted_at=store.files_deleted_at(job.id),
        recoveries=recovery_time.recoveries(attempts),
        goodput=tuple(_goodput(store, attempts, now)),
    )


def _with_checkpoints(attempts: Sequence[Attempt], progress: Progress | None) -> Iterator[Attempt]:
    """With the newest one of a live attempt, and with those of lost hosts, which only the next
    attempt has reported."""
    for attempt, after in zip_longest(attempts, attempts[1:]):
        newest = progress.checkpoint_step if attempt.live and progress is not None else None
        continued = recovery_time.resumed_step(after) if after is not None else None
        known = max(attempt.checkpoint_step or 0, newest or 0, continued or 0)
        yield replace(attempt, checkpoint_step=known or None)


def _goodput(store: Store, attempts: Sequence[Attempt], now: datetime) -> Iterator[float | None]:
    reporting = attempts_with_steps(store, attempts)
    for attempt, after in zip_longest(attempts, attempts[1:]):
        reports = attempt.id in reporting
        yield goodput.useful_share(goodput.spans(attempt, now, reporting=reports, after=after))


def host_rows(store: Store, attempt: Attempt) -> list[HostRow]:
    hosts = [host for slice_id in attempt.slices for host in store.hosts(slice_id)]
    ranks = hosts_by_rank(store, attempt)
    liveness_rows = store.last_heartbeats([host.id for host in hosts])
    rows = []
    for host in hosts:
        seen = liveness_rows.get(host.id)
        rows.append(
            HostRow(
                id=host.id,
                process=ranks.index(host.id) if host.id in ranks else -1,
                slice_id=host.slice_id,
                address=host.address,
                phase=host.phase,
                notice=host.notice,
                seen_at=None if seen is None else seen.seen_at,
                progress=_progress(attempt, seen),
            )
        )
    return rows


def hosts_by_rank(store: Store, attempt: Attempt) -> list[HostId]:
    """The hosts of an attempt, in rank order."""
    job = store.job(attempt.job_id)
    per_slice = type_lookup.find(job.spec.accelerator).hosts if job is not None else 0
    return [host_id(slice_id, index) for slice_id in attempt.slices for index in range(per_slice)]


def slice_rows(store: Store, slices: Sequence[TpuSlice], now: datetime) -> list[SliceRow]:
    kinds = {each.id: type_lookup.find(each.accelerator) for each in slices}
    hosts = [host_id(each.id, index) for each in slices for index in range(kinds[each.id].hosts)]
    seen: dict[SliceId, int] = {}
    for host, row in store.last_heartbeats(hosts).items():
        if now - row.seen_at <= liveness.HOST_LOST_AFTER:
            slice_id = SliceId(host.rpartition("/")[0])
            seen[slice_id] = seen.get(slice_id, 0) + 1
    return [
        SliceRow(
            id=each.id,
            provider=each.provider,
            accelerator=each.accelerator,
            zone=each.zone,
            capacity=each.capacity,
            state=each.state,
            reason=each.reason,
            loss=each.loss,
            pool=each.pool,
            job_id=each.job_id,
            hosts=kinds[each.id].hosts,
            hosts_seen=seen.get(each.id, 0),
            chips=kinds[each.id].chips,
            node=each.node,
            requested_at=each.requested_at,
            ready_at=each.ready_at,
            gone_at=each.gone_at,
            reserved_for=each.reserved_for if each.is_reserved(now) else None,
            reserved_until=each.reserved_until if each.is_reserved(now) else None,
        )
        for each in slices
    ]


def event_page(store: Store, query: EventQuery) -> EventPage:
    rows = tuple(store.events(query))
    return EventPage(events=rows, last=rows[-1].seq if rows else query.after)


def _ambiguous(what: str, jobs: Sequence[Job]) -> str:
    shown = ", ".join(f"{job.id} ({job.state})" for job in jobs[:5])
    more = " and more" if len(jobs) > 5 else ""
    return f"several jobs {what}: {shown}{more}; use an id"
