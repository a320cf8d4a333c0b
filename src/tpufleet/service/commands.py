"""What people change: jobs, pools, users, tokens, secrets. Each is one commit; what follows from
it is the controller's to decide."""

from __future__ import annotations

import secrets as randomness
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from tpufleet.errors import BadInput, Conflict, Forbidden, NotFound
from tpufleet.model import topology
from tpufleet.model.api_types import CreatedToken, FaultRequest, NewToken, NewUser, SecretValue
from tpufleet.model.events import Event, EventKind
from tpufleet.model.inbox import InboxMessage, InboxMessageKind
from tpufleet.model.job_file import label_error
from tpufleet.model.jobs import ENDED_STATES, Job, JobState
from tpufleet.model.pools import Pool
from tpufleet.model.slices import SliceId, SliceState
from tpufleet.model.users import Role, Token, User
from tpufleet.service import auth, identifiers
from tpufleet.service.auth import Caller
from tpufleet.service.files.secrets import SecretFiles
from tpufleet.stores.base import ChangeSet, JobQuery, Store

LIVE_STATES = frozenset(JobState) - ENDED_STATES


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandContext:
    """Who changes something, when, and where it is recorded."""

    store: Store
    caller: Caller
    now: datetime


def cancel(act: CommandContext, job: Job) -> None:
    """Ask for it. Asking twice is asking once."""
    act.caller.require_owner(job.owner, f"job {job.id}")
    if job.state is JobState.CANCELLED or job.cancel_requested_by is not None:
        return
    if job.ended:
        raise Conflict(f"job {job.id} has already {job.state}; there is nothing left to cancel")
    message = InboxMessage(
        kind=InboxMessageKind.CANCEL, at=act.now, by=act.caller.name, job_id=job.id
    )
    event = Event(
        at=act.now,
        kind=EventKind.JOB,
        state="cancel_requested",
        message=f"{act.caller.name} asked to cancel it",
        job_id=job.id,
        by=act.caller.name,
    )
    act.store.commit(ChangeSet(messages=[message], events=[event]))


def require_files_deletable(act: CommandContext, job: Job) -> None:
    act.caller.require_owner(job.owner, f"job {job.id}")
    if not job.ended:
        raise Conflict(f"job {job.id} is {job.state}, and needs its files; cancel it first")


def put_pool(act: CommandContext, pool: Pool, providers: Sequence[str]) -> Pool:
    """Make or change a pool; the accelerator may be spelled in any way."""
    if fault := label_error(pool.name):
        raise BadInput(f"name: {fault}")
    if pool.provider not in providers:
        raise BadInput(
            f"provider: none is called {pool.provider!r}{identifiers.suggestion(pool.provider, providers)}"
        )
    if pool.largest < 1 or not 0 <= pool.smallest <= pool.largest:
        raise BadInput("smallest, largest: 0 ≤ smallest ≤ largest and 1 ≤ largest are needed")
    if pool.slices_per_user is not None and pool.slices_per_user < 1:
        raise BadInput("slices_per_user: at least 1, or leave it out for no limit")
    if not pool.capacity:
        raise BadInput("capacity: name at least one kind, such as spot")
    if pool.idle_after.total_seconds() < 0:
        raise BadInput("idle_after: cannot be negative")
    for member in pool.members:
        identifiers.check_user_name(member)
    pool = replace(pool, accelerator=topology.find(pool.accelerator).name)
    _commit_pool(act, pool.name, "changed", ChangeSet(pools=[pool]))
    return pool


def delete_pool(act: CommandContext, name: str) -> None:
    if act.store.pool(name) is None:
        known = [pool.name for pool in act.store.pools()]
        raise NotFound(f"no pool is called {name!r}{identifiers.suggestion(name, known)}")
    users = act.store.jobs(JobQuery(pool=name, states=LIVE_STATES, limit=1))
    if users:
        raise Conflict(
            f"job {users[0].id} ({users[0].spec.name}) still uses pool {name}; "
            "cancel it or let it end first"
        )
    _commit_pool(act, name, "dropped", ChangeSet(deleted_pools=[name]))


def _commit_pool(act: CommandContext, name: str, state: str, change: ChangeSet) -> None:
    by = act.caller.name
    message = InboxMessage(kind=InboxMessageKind.POOL_CHANGED, at=act.now, by=by, pool=name)
    event = Event(
        at=act.now, kind=EventKind.POOL, state=state, message=f"{by} {state} it", pool=name, by=by
    )
    act.store.commit(replace(change, messages=[message], events=[event]))


def request_fault(
    act: CommandContext, slice_id: SliceId, order: FaultRequest, faults: Sequence[str]
) -> None:
    """Have the provider hurt a slice: for drills and tests."""
    if order.fault not in faults:
        raise BadInput(
            f"no fault is called {order.fault!r}{identifiers.suggestion(order.fault, faults)}"
        )
    tpu_slice = act.store.slice(slice_id)
    if tpu_slice is None:
        known = [each.id for each in act.store.slices()]
        raise NotFound(f"no slice is called {slice_id!r}{identifiers.suggestion(slice_id, known)}")
    if tpu_slice.state is SliceState.GONE:
        raise Conflict(f"slice {slice_id} is gone; there is nothing left to hurt")
    hosts = topology.find(tpu_slice.accelerator).hosts
    if order.host is not None and not 0 <= order.host < hosts:
        raise BadInput(f"{slice_id} has hosts 0 to {hosts - 1}; there is no host {order.host}")
    message = InboxMessage(
        kind=InboxMessageKind.FAULT,
        at=act.now,
        by=act.caller.name,
        slice_id=slice_id,
        fault=order.fault,
        host_index=order.host,
    )
    act.store.commit(ChangeSet(messages=[message]))


def put_user(act: CommandContext, new: NewUser) -> User:
    """Make a user, or change their role."""
    known = act.store.user(identifiers.check_user_name(new.name))
    if known is not None and known.role is Role.ADMIN and new.role is not Role.ADMIN:
        _must_leave_an_admin(act, new.name)
    user = User(
        name=new.name, role=new.role, created_at=act.now if known is None else known.created_at
    )
    act.store.put_user(user)
    return user


def delete_user(act: CommandContext, files: SecretFiles, name: str) -> None:
    _must_know_user(act, name)
    _must_leave_an_admin(act, name)
    act.store.delete_user(name)
    files.delete_all(name)


def create_token(act: CommandContext, new: NewToken) -> CreatedToken:
    user = new.user or act.caller.name
    if user != act.caller.name and not act.caller.is_admin:
        raise Forbidden(f"only {user} or an admin may make a token for {user}")
    if len(new.note) > 200 or "\0" in new.note:
        raise BadInput("note: at most 200 characters, without null characters")
    _must_know_user(act, user)
    text = auth.new_token()
    token = Token(
        id=randomness.token_hex(6),
        user=user,
        hash=auth.token_hash(text),
        created_at=act.now,
        note=new.note,
    )
    act.store.put_token(token)
    return CreatedToken(id=token.id, user=user, token=text)


def revoke_token(act: CommandContext, token_id: str) -> None:
    mine = act.store.tokens(None if act.caller.is_admin else act.caller.name)
    if token_id not in {token.id for token in mine}:
        raise NotFound(f"no token of yours has the id {token_id!r}; `tpu token list` shows them")
    act.store.delete_token(token_id)


def put_secret(act: CommandContext, files: SecretFiles, name: str, given: SecretValue) -> None:
    files.put(name, given.value, _owner_of_secret(act, shared=given.shared))


def delete_secret(act: CommandContext, files: SecretFiles, name: str, *, shared: bool) -> None:
    """Not while a job that has not ended would miss it at its next attempt."""
    owner = _owner_of_secret(act, shared=shared)
    for job in act.store.jobs(JobQuery(owner=owner, states=LIVE_STATES, limit=1_000_000)):
        has_own = shared and name in files.names(job.owner)
        if name in job.spec.secrets.values() and not has_own:
            raise Conflict(f"job {job.id} ({job.spec.name}) still needs the secret {name}")
    files.delete(name, owner)


def _owner_of_secret(act: CommandContext, *, shared: bool) -> str | None:
    if shared and not act.caller.is_admin:
        raise Forbidden("only an admin changes what is shared; leave out --shared for your own")
    return None if shared else act.caller.name


def _must_know_user(act: CommandContext, name: str) -> None:
    if act.store.user(name) is None:
        known = [user.name for user in act.store.users()]
        raise NotFound(f"no user is called {name!r}{identifiers.suggestion(name, known)}")


def _must_leave_an_admin(act: CommandContext, name: str) -> None:
    admins = {user.name for user in act.store.users() if user.role is Role.ADMIN}
    if admins == {name}:
        raise Conflict(f"{name} is the only admin; make another one first")
