"""What people change: jobs, pools, users, tokens, secrets. Each is one commit; what follows from
it is the controller's to decide."""

from __future__ import annotations

import secrets as randomness
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from tpufleet.errors import BadInput, Conflict, Forbidden, NotFound
from tpufleet.model import topology
from tpufleet.model.events import Event, EventKind
from tpufleet.model.jobs import ENDED, Job, JobState
from tpufleet.model.messages import Message, MessageKind
from tpufleet.model.pools import Pool
from tpufleet.model.slices import SliceId, SliceState
from tpufleet.model.specs import label_fault
from tpufleet.model.users import Role, Token, User
from tpufleet.model.views import FaultOrder, MadeToken, NewToken, NewUser, SecretValue
from tpufleet.service import auth, names
from tpufleet.service.auth import Caller
from tpufleet.service.secret_files import SecretFiles
from tpufleet.stores.base import Change, JobQuery, Store

LIVE_STATES = frozenset(JobState) - ENDED


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """Who changes something, when, and where it is recorded."""

    store: Store
    caller: Caller
    now: datetime


def cancel(act: Act, job: Job) -> None:
    """Ask for it. Asking twice is asking once."""
    act.caller.must_own(job.owner, f"job {job.id}")
    if job.state is JobState.CANCELLED or job.cancel_requested_by is not None:
        return
    if job.ended:
        raise Conflict(f"job {job.id} has already {job.state}; there is nothing left to cancel")
    message = Message(kind=MessageKind.CANCEL, at=act.now, by=act.caller.name, job_id=job.id)
    event = Event(
        at=act.now,
        kind=EventKind.JOB,
        state="cancel_requested",
        words=f"{act.caller.name} asked to cancel it",
        job_id=job.id,
        by=act.caller.name,
    )
    act.store.commit(Change(messages=[message], events=[event]))


def may_drop_files(act: Act, job: Job) -> None:
    act.caller.must_own(job.owner, f"job {job.id}")
    if not job.ended:
        raise Conflict(f"job {job.id} is {job.state}, and needs its files; cancel it first")


def put_pool(act: Act, pool: Pool, providers: Sequence[str]) -> Pool:
    """Make or change a pool; the accelerator may be spelled in any way."""
    if fault := label_fault(pool.name):
        raise BadInput(f"name: {fault}")
    if pool.provider not in providers:
        raise BadInput(
            f"provider: none is called {pool.provider!r}{names.nearest(pool.provider, providers)}"
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
        names.person(member)
    pool = replace(pool, accelerator=topology.find(pool.accelerator).name)
    _commit_pool(act, pool.name, "changed", Change(pools=[pool]))
    return pool


def drop_pool(act: Act, name: str) -> None:
    if act.store.pool(name) is None:
        known = [pool.name for pool in act.store.pools()]
        raise NotFound(f"no pool is called {name!r}{names.nearest(name, known)}")
    users = act.store.jobs(JobQuery(pool=name, states=LIVE_STATES, limit=1))
    if users:
        raise Conflict(
            f"job {users[0].id} ({users[0].spec.name}) still uses pool {name}; "
            "cancel it or let it end first"
        )
    _commit_pool(act, name, "dropped", Change(dropped_pools=[name]))


def _commit_pool(act: Act, name: str, state: str, change: Change) -> None:
    by = act.caller.name
    message = Message(kind=MessageKind.POOL_CHANGED, at=act.now, by=by, pool=name)
    event = Event(
        at=act.now, kind=EventKind.POOL, state=state, words=f"{by} {state} it", pool=name, by=by
    )
    act.store.commit(replace(change, messages=[message], events=[event]))


def order_fault(act: Act, slice_id: SliceId, order: FaultOrder, faults: Sequence[str]) -> None:
    """Have the provider hurt a slice: for drills and tests."""
    if order.fault not in faults:
        raise BadInput(f"no fault is called {order.fault!r}{names.nearest(order.fault, faults)}")
    tpu_slice = act.store.slice(slice_id)
    if tpu_slice is None:
        known = [each.id for each in act.store.slices()]
        raise NotFound(f"no slice is called {slice_id!r}{names.nearest(slice_id, known)}")
    if tpu_slice.state is SliceState.GONE:
        raise Conflict(f"slice {slice_id} is gone; there is nothing left to hurt")
    hosts = topology.find(tpu_slice.accelerator).hosts
    if order.host is not None and not 0 <= order.host < hosts:
        raise BadInput(f"{slice_id} has hosts 0 to {hosts - 1}; there is no host {order.host}")
    message = Message(
        kind=MessageKind.FAULT,
        at=act.now,
        by=act.caller.name,
        slice_id=slice_id,
        fault=order.fault,
        host_index=order.host,
    )
    act.store.commit(Change(messages=[message]))


def put_user(act: Act, new: NewUser) -> User:
    """Make a user, or change their role."""
    known = act.store.user(names.person(new.name))
    if known is not None and known.role is Role.ADMIN and new.role is not Role.ADMIN:
        _must_leave_an_admin(act, new.name)
    user = User(
        name=new.name, role=new.role, created_at=act.now if known is None else known.created_at
    )
    act.store.put_user(user)
    return user


def drop_user(act: Act, files: SecretFiles, name: str) -> None:
    _must_know_user(act, name)
    _must_leave_an_admin(act, name)
    act.store.drop_user(name)
    files.forget(name)


def make_token(act: Act, new: NewToken) -> MadeToken:
    user = new.user or act.caller.name
    if user != act.caller.name and not act.caller.admin:
        raise Forbidden(f"only {user} or an admin may make a token for {user}")
    if len(new.note) > 200 or "\0" in new.note:
        raise BadInput("note: at most 200 characters, without null characters")
    _must_know_user(act, user)
    text = auth.new_token()
    token = Token(
        id=randomness.token_hex(6),
        user=user,
        hash=auth.hash_of(text),
        created_at=act.now,
        note=new.note,
    )
    act.store.put_token(token)
    return MadeToken(id=token.id, user=user, token=text)


def drop_token(act: Act, token_id: str) -> None:
    mine = act.store.tokens(None if act.caller.admin else act.caller.name)
    if token_id not in {token.id for token in mine}:
        raise NotFound(f"no token of yours has the id {token_id!r}; `tpu token list` shows them")
    act.store.drop_token(token_id)


def put_secret(act: Act, files: SecretFiles, name: str, given: SecretValue) -> None:
    files.put(name, given.value, _owner_of_secret(act, shared=given.shared))


def drop_secret(act: Act, files: SecretFiles, name: str, *, shared: bool) -> None:
    """Not while a job that has not ended would miss it at its next attempt."""
    owner = _owner_of_secret(act, shared=shared)
    for job in act.store.jobs(JobQuery(owner=owner, states=LIVE_STATES, limit=1_000_000)):
        has_own = shared and name in files.names(job.owner)
        if name in job.spec.secrets.values() and not has_own:
            raise Conflict(f"job {job.id} ({job.spec.name}) still needs the secret {name}")
    files.drop(name, owner)


def _owner_of_secret(act: Act, *, shared: bool) -> str | None:
    if shared and not act.caller.admin:
        raise Forbidden("only an admin changes what is shared; leave out --shared for your own")
    return None if shared else act.caller.name


def _must_know_user(act: Act, name: str) -> None:
    if act.store.user(name) is None:
        known = [user.name for user in act.store.users()]
        raise NotFound(f"no user is called {name!r}{names.nearest(name, known)}")


def _must_leave_an_admin(act: Act, name: str) -> None:
    admins = {user.name for user in act.store.users() if user.role is Role.ADMIN}
    if admins == {name}:
        raise Conflict(f"{name} is the only admin; make another one first")
