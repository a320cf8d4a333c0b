"""Applies the retention rules of the server: deletes old logs, code, checkpoints and events. Every
deletion of files of a job is an event of that job."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from datetime import datetime, timedelta

from tpufleet.model.api_types import PurgeRequest
from tpufleet.model.job.jobs import ENDED_STATES, JobId
from tpufleet.model.people.retention_rules import RetentionRules
from tpufleet.model.people.users import Role
from tpufleet.policy.job_lineage import JobLineage
from tpufleet.service.files.job_files import JobFiles
from tpufleet.service.jobs import checkpoint_leases
from tpufleet.service.jobs.commands import CommandContext
from tpufleet.service.jobs.lineages import batches, lineages_of, pages
from tpufleet.service.jobs.queries import BY_ID
from tpufleet.service.operations import archiving
from tpufleet.service.transport.auth import Caller
from tpufleet.stores.base import (
    ChangeSet,
    EventQuery,
    FileKind,
    JobQuery,
    Store,
    checkpoint_reference,
)

logger = logging.getLogger(__name__)

ACTOR = "retention"
LEASE_NAME = "retention"
_LATEST_EVENTS = 20  # of a job that has ended, and so has few more
LEASE_TTL = timedelta(minutes=50)  # shorter than the interval: one server each time


def apply(store: Store, files: JobFiles, rules: RetentionRules, now: datetime) -> dict[str, int]:
    """Returns how many jobs lost files of each kind, and how many events were deleted."""
    lease = store.acquire_lease(LEASE_NAME, secrets.token_hex(4), LEASE_TTL, store.time() or now)
    if lease is None:
        return {}  # another server does it
    caller = Caller(name=ACTOR, role=Role.ADMIN)
    context = CommandContext(store=store, caller=caller, now=now)
    counts = {
        "logs": _apply(context, files, FileKind.LOGS, rules.logs),
        "checkpoints": _apply(context, files, FileKind.CHECKPOINTS, rules.checkpoints),
        "code": _apply_to_code(context, files, rules.code),
        "events": 0 if rules.events is None else store.delete_events(now - rules.events),
    }
    for kind, count in counts.items():
        if count:
            unit = "events" if kind == "events" else f"{kind} of jobs"
            logger.info("retention: deleted %s %s", count, unit)
    return counts


def _apply(context: CommandContext, files: JobFiles, kind: FileKind, age: timedelta | None) -> int:
    count = 0
    for expired in _expired(context, kind, age):
        wanted = [checkpoint_reference(each) for each in expired if kind is FileKind.CHECKPOINTS]
        named = context.store.referring_jobs(wanted)
        done = []
        for job_id, lineage in expired.items():
            # Checkpoints that a job of another lineage names as its own are kept.
            users = named.get(checkpoint_reference(job_id), set())
            if users - {job.id for job in lineage.jobs}:
                continue
            if files.size(job_id, (kind.value,)):
                if not _delete(context, files, job_id, lineage, kind, age):
                    continue
                count += 1
            done.append(job_id)
        context.store.mark_deleted(done, kind)
    return count


def _delete(
    context: CommandContext,
    files: JobFiles,
    job_id: JobId,
    lineage: JobLineage,
    kind: FileKind,
    age: timedelta | None,
) -> bool:
    """Whether all were deleted; either is an event. One job must not keep the files of the
    others."""
    store = context.store
    reason = f"older than {age and age.days} days (retention.{kind})"
    try:
        if kind is FileKind.LOGS:
            files.delete(job_id, (kind,))
        else:
            # Under the lease no job can be resumed from them.
            with checkpoint_leases.exclusive(store, context.now) as lease:
                if _resumed_meanwhile(store, lineage):
                    return False
                store.commit(ChangeSet(), fence=lease)  # still held
                files.delete(job_id, (kind,))
    except archiving.DELETION_ERRORS as error:
        logger.warning(
            "cannot delete the %s of job %s; retrying in an hour: %s", kind, job_id, error
        )
        problem = f"{archiving.deletion_problem(error)}; retrying every hour: {reason}"
        _record_failure(context, job_id, kind, problem)
        return False
    event = context.job_event(job_id, f"{kind}_deleted", f"{kind} deleted: {reason}")
    store.commit(ChangeSet(events=[event]))
    return True


def _record_failure(context: CommandContext, job_id: JobId, kind: FileKind, problem: str) -> None:
    """Once, and not every hour."""
    state = f"{kind}_not_deleted"
    latest = EventQuery(job_id=job_id, newest=True, limit=_LATEST_EVENTS)
    if not any(event.state == state for event in context.store.events(latest)):
        event = context.job_event(job_id, state, f"some {kind} could not be deleted: {problem}")
        context.store.commit(ChangeSet(events=[event]))


def _expired(
    context: CommandContext, kind: FileKind, age: timedelta | None
) -> Iterator[dict[JobId, JobLineage]]:
    """Jobs that may have files of this kind and whose whole lineage ended so long ago; the oldest
    first, some at a time."""
    if age is None:
        return
    before = context.now - age
    query = JobQuery(archived=None, having=kind, states=ENDED_STATES, oldest_first=True)
    seen: set[JobId] = set()
    for page in pages(context.store, query):
        if page[0].submitted_at >= before:
            return
        expired = {
            job.id: lineage
            for lineage in lineages_of(context.store, page, JobQuery(archived=None))
            if lineage.ended_by(before)
            for job in lineage.jobs
            if job.id not in seen
        }
        seen |= expired.keys()
        yield expired


def _resumed_meanwhile(store: Store, lineage: JobLineage) -> bool:
    known = {job.id for job in lineage.jobs}
    [now] = lineages_of(store, lineage.jobs, JobQuery(archived=None))
    return any(job.id not in known for job in now.jobs) or now.live is not None


def _apply_to_code(context: CommandContext, files: JobFiles, age: timedelta | None) -> int:
    count = 0
    for expired in _expired(context, FileKind.FILES, age):
        for batch in batches(list(expired)):
            request = PurgeRequest(jobs=tuple(f"{BY_ID}{job_id}" for job_id in batch))
            count += len(archiving.purge(context, files, request).jobs)
    return count
