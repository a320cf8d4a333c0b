"""Commands of users: on jobs, pools, slices and secrets. Each is one commit; the controller reacts
to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tpufleet.errors import BadInput, Conflict, Forbidden, unknown
from tpufleet.model import identifiers
from tpufleet.model.api_types import FaultRequest, JobChanges, SecretValue
from tpufleet.model.events import Event, EventKind
from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice
from tpufleet.model.inbox import InboxMessage, InboxMessageKind
from tpufleet.model.job import job_file
from tpufleet.model.job.job_edits import JobEdit
from tpufleet.model.job.job_search import matches_wildcard
from tpufleet.model.job.jobs import LIVE_STATES, Job, JobId, JobState
from tpufleet.model.values.names import MAX_ITEMS
from tpufleet.service.files.secrets import JobSecrets
from tpufleet.service.lookups import require_host_index, require_slice
from tpufleet.service.transport.auth import Caller
from tpufleet.stores.base import ChangeSet, JobQuery, Store

MAX_WILDCARD = 200  # characters of a pattern; a tag has fewer
MAX_SHOWN = 200  # characters of a new value that its event shows
# Admins have the whole range, so they can always place a job ahead of those of members.
MAX_MEMBER_PRIORITY = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandContext:
    """Who runs a command, when, and in which store."""

    store: Store
    caller: Caller
    now: datetime

    def message(self, kind: InboxMessageKind, **about: Any) -> InboxMessage:
        """To the controller, from the caller."""
        return InboxMessage(kind=kind, at=self.now, by=self.caller.name, **about)

    def job_event(self, job_id: JobId, state: str, message: str) -> Event:
        """That the caller caused."""
        by, kind = self.caller.name, EventKind.JOB
        return Event(at=self.now, kind=kind, state=state, message=message, job_id=job_id, by=by)

    def pool_event(self, pool: str, state: str, message: str, **about: Any) -> Event:
        by, kind = self.caller.name, EventKind.POOL
        return Event(
            at=self.now, kind=kind, state=state, message=message, pool=pool, by=by, **about
        )


def require_live(job: Job) -> None:
    if job.ended:
        again = "rerun" if job.state is JobState.SUCCEEDED else "resume"
        raise Conflict(
            f"job {job.id} has already {job.state}\n  next: `tpu {again} {job.id}` makes a new one"
        )


def cancel(context: CommandContext, job: Job, reason: str = "") -> None:
    """Request cancellation. Idempotent."""
    context.caller.require_job_owner(job)
    if job.state is JobState.CANCELLED or job.cancel_requested_by is not None:
        return
    require_live(job)
    notice = context.message(InboxMessageKind.CANCEL, job_id=job.id)
    message = f"cancellation requested by {context.caller.name}{reason and f': {reason}'}"
    event = context.job_event(job.id, "cancel_requested", message)
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
    if abs(priority) > MAX_MEMBER_PRIORITY:
        most = MAX_MEMBER_PRIORITY
        caller.require_admin(f"priority: {priority}, not from -{most} to {most},")


def edit_job(context: CommandContext, job: Job, edit: JobEdit, message: str) -> Job:
    """Record the edit, why, and tell the controller if the job is live."""
    event = context.job_event(job.id, "edited", message)
    notice = [] if job.ended else [context.message(InboxMessageKind.EDITED, job_id=job.id)]
    context.store.commit(ChangeSet(edits=[edit], events=[event], messages=notice))
    return context.store.job(job.id) or job


def _changed_tags(job: Job, changes: JobChanges) -> tuple[str, ...]:
    tags = job.spec.tags if changes.tags is None else changes.tags
    identifiers.check_range("number of remove_tags", len(changes.remove_tags), 0, MAX_ITEMS)
    kept = [
        tag
        for tag in tags
        if not any(matches_wildcard(pattern[:MAX_WILDCARD], tag) for pattern in changes.remove_tags)
    ]
    return tuple(dict.fromkeys((*kept, *changes.add_tags)))


def _shown(value: object) -> str:
    text = ", ".join(value) or "none" if isinstance(value, tuple) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def require_ended(job: Job, then: str) -> None:
    """`then`: what it can be after that."""
    if not job.ended:
        raise Conflict(
            f"job {job.id} ({job.spec.name}) is {job.state}; it can be {then} after it has ended\n"
            f"  next: wait for it with `tpu logs -f {job.id}`, or run `tpu cancel {job.id}`"
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
    tpu_slice = require_slice(context.store, slice_id, live=True)
    if tpu_slice.reserved_for is None:
        raise Conflict(f"slice {slice_id} is not held after a failure")
    context.caller.require_owner(tpu_slice.reserved_for, f"the hold on slice {slice_id}")
    notice = context.message(InboxMessageKind.HELD_SLICE_RELEASED, slice_id=slice_id)
    context.store.commit(ChangeSet(messages=[notice]))


def request_fault(
    context: CommandContext, slice_id: SliceId, request: FaultRequest, faults: Sequence[str]
) -> None:
    """Request that the provider injects a fault into a slice."""
    if request.fault not in faults:
        raise unknown("fault", request.fault, faults)
    tpu_slice = require_slice(context.store, slice_id)
    require_slice_access(context, tpu_slice)
    if tpu_slice.state is SliceState.GONE:
        raise Conflict(f"slice {slice_id} is gone")
    require_host_index(tpu_slice, request.host)
    notice = context.message(
        InboxMessageKind.FAULT, slice_id=slice_id, fault=request.fault, host_index=request.host
    )
    context.store.commit(ChangeSet(messages=[notice]))


def put_secret(context: CommandContext, files: JobSecrets, name: str, secret: SecretValue) -> None:
    files.put(name, secret.value, _secret_owner(context, shared=secret.shared))


def delete_secret(context: CommandContext, files: JobSecrets, name: str, *, shared: bool) -> None:
    """Refused while a live job needs it for its next attempt."""
    owner = _secret_owner(context, shared=shared)
    for job in context.store.jobs(JobQuery(owner=owner, states=LIVE_STATES, limit=1_000_000)):
        has_own = shared and name in files.names(job.owner)
        if name in job.spec.secrets.values() and not has_own:
            raise Conflict(f"secret {name} is in use by job {job.id} ({job.spec.name})")
    files.delete(name, owner)


def _secret_owner(context: CommandContext, *, shared: bool) -> str | None:
    if shared:
        context.caller.require_admin("changing a shared secret, not your own,")
    return None if shared else context.caller.name
