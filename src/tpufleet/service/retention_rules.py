"""Applies the retention rules of the server: deletes old logs, code, checkpoints and events. Every
deletion of files of a job is an event of that job."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from datetime import datetime, timedelta

from tpufleet.model.api_types import PurgeRequest
from tpufleet.model.events import Event, EventKind
from tpufleet.model.jobs import Job, JobId
from tpufleet.model.users import Role
from tpufleet.policy import retention as policy
from tpufleet.policy.job_lineage import JobLineage, job_lineages
from tpufleet.policy.retention import Deletion, RetentionRule, RetentionRules, StoredFiles
from tpufleet.service import checkpoint_leases, retention
from tpufleet.service.auth import Caller
from tpufleet.service.commands import CommandContext
from tpufleet.service.files.job_files import JobFiles
from tpufleet.stores.base import ChangeSet, JobQuery, Store

logger = logging.getLogger(__name__)

ACTOR = "retention"
LEASE_NAME = "retention"
LEASE_TTL = timedelta(minutes=50)  # shorter than the interval: one server each time
_NO_LIMIT = 10_000_000


def apply(store: Store, files: JobFiles, rules: RetentionRules, now: datetime) -> dict[str, int]:
    """Returns how many jobs lost files of each kind, and how many events were deleted."""
    lease = store.acquire_lease(LEASE_NAME, secrets.token_hex(4), LEASE_TTL, store.time() or now)
    if lease is None:
        return {}  # another server does it
    counts = dict.fromkeys(("logs", "checkpoints", "code"), 0)
    if _may_apply(store, rules, now):
        lineages = job_lineages(store.jobs(JobQuery(archived=None, limit=_NO_LIMIT)))
        counts = {
            "logs": _apply_to_logs(store, files, rules.logs, lineages, now),
            "checkpoints": _apply_to_checkpoints(store, files, rules.checkpoints, lineages, now),
            "code": _apply_to_code(store, files, rules.code, now),
        }
    counts |= {
        "events": 0 if rules.events.age is None else store.delete_events(now - rules.events.age),
    }
    for kind, count in counts.items():
        if count:
            unit = "events" if kind == "events" else f"{kind} of jobs"
            logger.info("retention: deleted %s %s", count, unit)
    return counts


def _may_apply(store: Store, rules: RetentionRules, now: datetime) -> bool:
    """Reading all jobs takes long when there are many. Without a limit of size, only a job that is
    old enough and still has files makes it necessary."""
    kinds = (rules.logs, rules.checkpoints, rules.code)
    if any(rule.size is not None for rule in kinds):
        return True
    ages = [rule.age for rule in kinds if rule.age is not None]
    if not ages:
        return False
    old = JobQuery(archived=None, files_deleted=False, submitted_before=now - min(ages), limit=1)
    return bool(store.jobs(old))


def _apply_to_logs(
    store: Store,
    files: JobFiles,
    rule: RetentionRule,
    lineages: list[JobLineage],
    now: datetime,
) -> int:
    chosen = _choose(files.sizes("logs"), rule, lineages, now, "logs")
    for deletion in chosen:
        files.delete_kind(deletion.files.job_id, "logs")
        store.commit(ChangeSet(events=[_event(deletion, "logs", now)]))
    return len(chosen)


def _apply_to_checkpoints(
    store: Store,
    files: JobFiles,
    rule: RetentionRule,
    lineages: list[JobLineage],
    now: datetime,
) -> int:
    if rule == RetentionRule():
        return 0
    by_job = {job.id: lineage for lineage in lineages for job in lineage.jobs}
    # Checkpoints that a job of another lineage names as its own are kept.
    named: dict[str, set[str]] = {}
    for lineage in lineages:
        for job in lineage.jobs:
            for part in job.checkpoint.split("/"):
                if part in by_job and by_job[JobId(part)] is not lineage:
                    named.setdefault(part, set()).add(job.id)
    count = 0
    for deletion in _choose(files.sizes("checkpoints"), rule, lineages, now, "checkpoints"):
        job_id = deletion.files.job_id
        if job_id in named:
            continue
        # Under the lease no job can be resumed from them.
        with checkpoint_leases.exclusive(store, now) as lease:
            if _resumed_meanwhile(store, by_job[job_id]):
                continue
            store.commit(ChangeSet(events=[_event(deletion, "checkpoints", now)]), fence=lease)
            files.delete_kind(job_id, "checkpoints")
        count += 1
    return count


def _resumed_meanwhile(store: Store, lineage: JobLineage) -> bool:
    known = {job.id for job in lineage.jobs}
    children = [
        child
        for job in lineage.jobs
        for child in store.jobs(JobQuery(parent=job.id, archived=None, limit=_NO_LIMIT))
    ]
    return any(child.id not in known or not child.ended for child in children)


def _apply_to_code(store: Store, files: JobFiles, rule: RetentionRule, now: datetime) -> int:
    if rule.age is None:
        return 0
    caller = Caller(name=ACTOR, role=Role.ADMIN)
    request = PurgeRequest(older_than=rule.age, all_owners=True, dry_run=False)
    context = CommandContext(store=store, caller=caller, now=now)
    return len(retention.purge(context, files, request).jobs)


def _choose(
    sizes: Mapping[JobId, int],
    rule: RetentionRule,
    lineages: list[JobLineage],
    now: datetime,
    name: str,
) -> list[Deletion]:
    ended, in_use = [], 0
    for lineage in lineages:
        ended_at = _ended_at(lineage.jobs)
        for job in lineage.jobs:
            size = sizes.get(job.id)
            if size is not None and ended_at is not None:
                ended.append(StoredFiles(job_id=job.id, ended_at=ended_at, size=size))
            else:
                in_use += size or 0
    return policy.choose(ended, in_use, rule, now, name)


def _ended_at(jobs: tuple[Job, ...]) -> datetime | None:
    """When the last of them ended; None while one is live."""
    moments = [job.ended_at for job in jobs]
    return None if None in moments else max(moment for moment in moments if moment is not None)


def _event(deletion: Deletion, kind: str, now: datetime) -> Event:
    return Event(
        at=now,
        kind=EventKind.JOB,
        state=f"{kind}_deleted",
        message=f"{kind} deleted: {deletion.reason}",
        job_id=deletion.files.job_id,
        by=ACTOR,
    )
