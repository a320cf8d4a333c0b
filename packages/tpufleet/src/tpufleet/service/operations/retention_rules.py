"""Applies the retention rules of the server: deletes old logs, code, checkpoints and events. Every
deletion of files of a job is an event of that job."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from datetime import datetime, timedelta

from tpufleet.model.api_types import PurgeRequest
from tpufleet.model.job.jobs import ENDED_STATES, Job, JobId
from tpufleet.model.people.retention_rules import RetentionRule, RetentionRules
from tpufleet.model.people.users import Role
from tpufleet.policy.accounting import retention as policy
from tpufleet.policy.accounting.retention import Deletion, StoredFiles
from tpufleet.policy.job_lineage import JobLineage
from tpufleet.service.files.job_files import JobFiles
from tpufleet.service.jobs import checkpoint_leases
from tpufleet.service.jobs.commands import CommandContext
from tpufleet.service.jobs.lineages import lineages_of, pages
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
        "events": 0 if rules.events.age is None else store.delete_events(now - rules.events.age),
    }
    for kind, count in counts.items():
        if count:
            unit = "events" if kind == "events" else f"{kind} of jobs"
            logger.info("retention: deleted %s %s", count, unit)
    return counts


def _apply(context: CommandContext, files: JobFiles, kind: FileKind, rule: RetentionRule) -> int:
    count = 0
    for deletions in _deletions(context.store, files, kind, rule, context.now):
        wanted = [_reference(each) for each, _ in deletions if kind is FileKind.CHECKPOINTS]
        named = context.store.referring_jobs(wanted)
        done = []
        for deletion, lineage in deletions:
            # Checkpoints that a job of another lineage names as its own are kept.
            if named.get(_reference(deletion), set()) - {job.id for job in lineage.jobs}:
                continue
            if deletion.files.size:
                if not _delete(context, files, deletion, lineage, kind):
                    continue
                count += 1
            done.append(deletion.files.job_id)
        context.store.mark_deleted(done, kind)
    return count


def _delete(
    context: CommandContext,
    files: JobFiles,
    deletion: Deletion,
    lineage: JobLineage,
    kind: FileKind,
) -> bool:
    """Whether all were deleted; either is an event. One job must not keep the files of the
    others."""
    job_id, store = deletion.files.job_id, context.store
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
        _record_failure(context, deletion, kind, archiving.deletion_problem(error))
        return False
    event = context.job_event(job_id, f"{kind}_deleted", f"{kind} deleted: {deletion.reason}")
    store.commit(ChangeSet(events=[event]))
    return True


def _record_failure(
    context: CommandContext, deletion: Deletion, kind: FileKind, problem: str
) -> None:
    """Once, and not every hour."""
    job_id, state = deletion.files.job_id, f"{kind}_not_deleted"
    latest = EventQuery(job_id=job_id, newest=True, limit=_LATEST_EVENTS)
    if any(event.state == state for event in context.store.events(latest)):
        return
    message = f"some {kind} could not be deleted: {problem}; retrying every hour: {deletion.reason}"
    context.store.commit(ChangeSet(events=[context.job_event(job_id, state, message)]))


def _reference(deletion: Deletion) -> str:
    return checkpoint_reference(deletion.files.job_id)


def _deletions(
    store: Store, files: JobFiles, kind: FileKind, rule: RetentionRule, now: datetime
) -> Iterator[list[tuple[Deletion, JobLineage]]]:
    """What the rule says, the oldest first, some jobs at a time. Only jobs that may have files of
    this kind are read, and only until the rule is met."""
    if rule == RetentionRule():
        return
    listed = files.sizes(kind.value) if rule.size is not None else None
    total = sum(listed.values()) if listed is not None else 0
    oldest = JobQuery(archived=None, having=kind, states=ENDED_STATES, oldest_first=True)
    seen: set[JobId] = set()
    for page in pages(store, oldest):
        too_much = rule.size is not None and total > rule.size
        if not too_much and (rule.age is None or page[0].submitted_at >= now - rule.age):
            return
        if listed is None and files.archive is not None:
            listed = files.sizes(kind.value)
        found = {
            job.id: lineage
            for lineage in lineages_of(store, page, JobQuery(archived=None))
            for job in lineage.jobs
        }
        candidates = {job_id: lineage for job_id, lineage in found.items() if job_id not in seen}
        seen |= candidates.keys()
        ended = [
            StoredFiles(
                job_id=job_id,
                ended_at=ended_at,
                size=files.kind_size(job_id, kind.value, listed),
            )
            for job_id, lineage in candidates.items()
            if (ended_at := _ended_at(lineage.jobs)) is not None
        ]
        others = total - sum(each.size for each in ended)
        chosen = policy.choose(ended, others, rule, now, kind.value)
        total -= sum(each.files.size for each in chosen)
        yield [(each, found[each.files.job_id]) for each in chosen]


def _resumed_meanwhile(store: Store, lineage: JobLineage) -> bool:
    known = {job.id for job in lineage.jobs}
    [now] = lineages_of(store, lineage.jobs, JobQuery(archived=None))
    return any(job.id not in known for job in now.jobs) or now.live is not None


def _apply_to_code(context: CommandContext, files: JobFiles, rule: RetentionRule) -> int:
    if rule.age is None:
        return 0
    request = PurgeRequest(older_than=rule.age, all_owners=True, dry_run=False)
    count, more = 0, True
    while more:
        report = archiving.purge(context, files, request, whole_lineages=True)
        count, more = count + len(report.jobs), report.more
    return count


def _ended_at(jobs: tuple[Job, ...]) -> datetime | None:
    """When the last of them ended; None while one is live."""
    moments = [job.ended_at for job in jobs]
    return None if None in moments else max(moment for moment in moments if moment is not None)
