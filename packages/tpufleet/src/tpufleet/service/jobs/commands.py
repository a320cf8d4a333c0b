"""Commands of users: on jobs, pools, slices and secrets. Each is one commit; the controller reacts
to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from tpufleet.errors import BadInput, Conflict, Forbidden, NotFound
from tpufleet.model.api_types import FaultRequest, JobChanges, SecretValue
from tpufleet.model.events import Event, EventKind
from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice
from tpufleet.model.inbox import InboxMessage, InboxMessageKind
from tpufleet.model.job import job_file
from tpufleet.model.job.job_edits import JobEdit
from tpufleet.model.job.job_search import matches_wildcard
from tpufleet.model.job.jobs import ENDED_STATES, Job, JobId, JobState
from tpufleet.model.tpu import topology
from tpufleet.model.values.field_types import MAX_ITEMS
from tpufleet.service.files.secrets import SecretFiles
from tpufleet.service.transport import identifiers
from tpufleet.service.transport.auth import Caller
from tpufleet.stores.base import ChangeSet, JobQuery, Store

MAX_WILDCARD = 200  # characters of a pattern; a tag has fewer
MAX_SHOWN = 200  # characters of a new value that its event shows
LIVE_STATES = frozenset(JobState) - ENDED_STATES
# Admins have the whole range, so they can always place a job ahead of those of members.
MAX_MEMBER_PRIORITY = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandContext:
    """Who runs a command, when, and in which store."""

    store: Store
    caller: Caller
    now: datetime


def cancel(context: CommandContext, job: Job, reason: str = "") -> None:
    """Request cancellation. Idempotent."""
    context.caller.require_job_owner(job)
    if job.state is JobState.CANCELLED or job.cancel_requested_by is not None:
        return
    if job.ended:
        raise Conflict(f"job {job.id} has already {job.state}")
    notice = InboxMessage(
        kind=InboxMessageKind.CANCEL, at=context.now, by=context.caller.name, job_id=job.id
    )
    event = Event(
        at=context.now,
        kind=EventKind.JOB,
        state="cancel_requested",
        message=f"cancellation requested by {context.caller.name}{reason and f': {reason}'}",
        job_id=job.id,
        by=context.caller.name,
    )
    context.store.commit(ChangeSet(messages=[notice], events=[event]))


def change_job(context: CommandContext, job: Job, changes: JobChanges) -> Job:
    """Change what users may change of a live or ended job."""
    context.caller.require_job_owner(job)
    fresh = {
        name: value
        for name in ("name", "notes", "priority")
        if (value := getattr(changes, name)) is not None
    }
    tags = _changed_tags(job, changes)
    if tags != job.spec.tags:
        fresh["tags"] = list(tags)
    # The same rules as for a job file.
    try:
        spec = job_file.parse_job({**job_file.to_document(job.spec), **fresh})
    except BadInput as error:  # the caller did not send all tags, so a position says nothing
        raise BadInput(re.sub(r"\btags\[\d+\]", "tags", str(error))) from error
    changed = {name: getattr(spec, name) for name in fresh if spec != job.spec}
    changed = {name: value for name, value in changed.items() if value != getattr(job.spec, name)}
    if not changed:
        return job
    if "priority" in changed:
        require_priority(context.caller, spec.priority)
    by = context.caller.name
    values = ", ".join(f"{name} to {_shown(value)}" for name, value in changed.items())
    return edit_job(context, job, JobEdit(job_id=job.id, **changed), f"{by} changed {values}")


def require_priority(caller: Caller, priority: int) -> None:
    if abs(priority) > MAX_MEMBER_PRIORITY and not caller.is_admin:
        raise Forbidden(
            f"priority: {priority} requires the admin role; choose from -{MAX_MEMBER_PRIORITY} to "
            f"{MAX_MEMBER_PRIORITY}"
        )


def edit_job(context: CommandContext, job: Job, edit: JobEdit, message: str) -> Job:
    """Record the edit, why, and tell the controller if the job is live."""
    by = context.caller.name
    event = Event(
        at=context.now,
        kind=EventKind.JOB,
        state="edited",
        message=message,
        job_id=job.id,
        by=by,
    )
    notice = InboxMessage(kind=InboxMessageKind.EDITED, at=context.now, by=by, job_id=job.id)
    context.store.commit(
        ChangeSet(edits=[edit], events=[event], messages=[] if job.ended else [notice])
    )
    return context.store.job(job.id) or job


def _changed_tags(job: Job, changes: JobChanges) -> tuple[str, ...]:
    tags = job.spec.tags if changes.tags is None else changes.tags
    if len(changes.remove_tags) > MAX_ITEMS:
        raise BadInput(f"remove_tags: at most {MAX_ITEMS} at a time")
    kept = [
        tag
        for tag in tags
        if not any(matches_wildcard(pattern[:MAX_WILDCARD], tag) for pattern in changes.remove_tags)
    ]
    return tuple(dict.fromkeys((*kept, *changes.add_tags)))


def _shown(value: object) -> str:
    text = ", ".join(value) or "none" if isinstance(value, tuple) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def require_files_deletable(context: CommandContext, job: Job) -> None:
    context.caller.require_job_owner(job)
    if not job.ended:
        raise Conflict(
            f"job {job.id} is {job.state} and needs its files; run `tpu cancel {job.id}` first"
        )


def require_slice_access(context: CommandContext, tpu_slice: TpuSlice) -> JobId | None:
    """For admins, and for the owner of the job that holds the slice: then that job."""
    if context.caller.is_admin:
        return None
    held = tpu_slice.job_id is None and tpu_slice.is_reserved(context.now)
    if held and tpu_slice.reserved_for == context.caller.name:
        return None
    job = context.store.job(tpu_slice.job_id) if tpu_slice.job_id is not None else None
    if job is None or job.owner != context.caller.name:
        holder = f"is held by a job of {job.owner}" if job is not None else "is held by no job"
        raise Forbidden(
            f"slice {tpu_slice.id} {holder}; requires the admin role, or a job of yours on it"
        )
    return job.id


def release_held_slice(context: CommandContext, slice_id: SliceId) -> None:
    """Return a slice that is held after a failure to its pool."""
    tpu_slice = context.store.slice(slice_id)
    if tpu_slice is None or tpu_slice.state is SliceState.GONE:
        raise NotFound(f"no slice named {slice_id!r}; list slices with `tpu inventory slices`")
    if tpu_slice.reserved_for is None:
        raise Conflict(f"slice {slice_id} is not held after a failure")
    context.caller.require_owner(tpu_slice.reserved_for, f"the hold on slice {slice_id}")
    notice = InboxMessage(
        kind=InboxMessageKind.HELD_SLICE_RELEASED,
        at=context.now,
        by=context.caller.name,
        slice_id=slice_id,
    )
    context.store.commit(ChangeSet(messages=[notice]))


def request_fault(
    context: CommandContext, slice_id: SliceId, request: FaultRequest, faults: Sequence[str]
) -> None:
    """Request that the provider injects a fault into a slice."""
    if request.fault not in faults:
        raise BadInput(
            f"unknown fault {request.fault!r}{identifiers.suggestion(request.fault, faults)}"
        )
    tpu_slice = context.store.slice(slice_id)
    if tpu_slice is None:
        known = [each.id for each in context.store.slices()]
        raise NotFound(f"no slice named {slice_id!r}{identifiers.suggestion(slice_id, known)}")
    require_slice_access(context, tpu_slice)
    if tpu_slice.state is SliceState.GONE:
        raise Conflict(f"slice {slice_id} is gone")
    hosts = topology.find(tpu_slice.accelerator).hosts
    if request.host is not None and not 0 <= request.host < hosts:
        raise BadInput(f"host: slice {slice_id} has hosts 0 to {hosts - 1}, not {request.host}")
    notice = InboxMessage(
        kind=InboxMessageKind.FAULT,
        at=context.now,
        by=context.caller.name,
        slice_id=slice_id,
        fault=request.fault,
        host_index=request.host,
    )
    context.store.commit(ChangeSet(messages=[notice]))


def put_secret(context: CommandContext, files: SecretFiles, name: str, secret: SecretValue) -> None:
    owner = _secret_owner(context, shared=secret.shared)
    files.put(name, secret.value, owner)
    if owner is not None and context.store.user(owner) is None:
        # Maybe written after `delete_user` had deleted the others.
        files.delete_all(owner)
        raise Conflict(f"user {owner} was deleted")


def delete_secret(context: CommandContext, files: SecretFiles, name: str, *, shared: bool) -> None:
    """Refused while a live job needs it for its next attempt."""
    owner = _secret_owner(context, shared=shared)
    for job in context.store.jobs(JobQuery(owner=owner, states=LIVE_STATES, limit=1_000_000)):
        has_own = shared and name in files.names(job.owner)
        if name in job.spec.secrets.values() and not has_own:
            raise Conflict(f"secret {name} is in use by job {job.id} ({job.spec.name})")
    files.delete(name, owner)


def _secret_owner(context: CommandContext, *, shared: bool) -> str | None:
    if shared and not context.caller.is_admin:
        raise Forbidden(
            "changing a shared secret requires the admin role; omit --shared to set your own"
        )
    return None if shared else context.caller.name
