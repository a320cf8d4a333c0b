"""Commands on pools. The controller scales them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from tpufleet.errors import BadInput, Conflict, unknown
from tpufleet.model import identifiers
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.inbox import InboxMessageKind
from tpufleet.model.job import pod_settings
from tpufleet.model.job.jobs import LIVE_STATES
from tpufleet.model.people.users import Role
from tpufleet.model.tpu import type_lookup
from tpufleet.model.values.durations import MAX_DURATION
from tpufleet.model.values.names import label_error
from tpufleet.policy.events import count_of
from tpufleet.service.fleet import reservations
from tpufleet.service.jobs.commands import CommandContext
from tpufleet.service.lookups import require_pool
from tpufleet.stores.base import ChangeSet, JobQuery

MAX_SLICES = 1_000_000


def put_pool(context: CommandContext, pool: Pool, providers: Sequence[str]) -> Pool:
    """Create or update a pool; any spelling of the accelerator is accepted."""
    if fault := label_error(pool.name):
        raise BadInput(f"name: {fault}")
    if pool.provider not in providers:
        raise unknown("provider", pool.provider, providers, "provider")
    if pool.largest < 1 or not 0 <= pool.smallest <= pool.largest:
        raise BadInput("smallest, largest: must satisfy 0 ≤ smallest ≤ largest and 1 ≤ largest")
    if pool.slices_per_user is not None:
        identifiers.check_range("slices_per_user", pool.slices_per_user, 1, MAX_SLICES)
    if not pool.capacity:
        raise BadInput("capacity: must list at least one kind, such as spot")
    zero, day = timedelta(0), timedelta(days=1)
    identifiers.check_range("hold_after_failure", pool.hold_after_failure, zero, day)
    identifiers.check_range("idle_after", pool.idle_after, zero, MAX_DURATION)
    before = context.store.pool(pool.name)
    _check_members(context, pool.members, before.members if before else ())
    pod_settings.check_pod(pool.pod)
    pool = replace(pool, accelerator=type_lookup.find(pool.accelerator).name)
    _commit_pool(context, pool.name, "changed", ChangeSet(pools=[pool]))
    reservations.end_of_former_members(context, pool)
    return pool


def _check_members(context: CommandContext, members: Sequence[str], before: Sequence[str]) -> None:
    """Those that are new must be users; others may have been deleted since."""
    users = [user.name for user in context.store.users()]
    for member in members:
        identifiers.check_user_name(member)
        if member not in users and member not in before:
            raise unknown("user", member, users, "members")


def remove_member(context: CommandContext, name: str) -> None:
    """Of all pools, when this user is deleted: a later one of that name is another person. A pool
    without members would be open to all users, so it gets an admin, who may use it anyway."""
    for pool in context.store.pools():
        if name in pool.members:
            kept = tuple(member for member in pool.members if member != name)
            changed = replace(pool, members=kept or (_other_admin(context, name),))
            message = f"member {name} was removed: the user was deleted"
            _commit_pool(context, pool.name, "changed", ChangeSet(pools=[changed]), message)


def _other_admin(context: CommandContext, name: str) -> str:
    admins = sorted(user.name for user in context.store.users() if user.role is Role.ADMIN)
    others = [admin for admin in admins if admin != name]
    return context.caller.name if context.caller.name in others or not others else others[0]


def delete_pool(context: CommandContext, name: str) -> None:
    """Its reservations end with it."""
    require_pool(context.store, name)
    jobs = context.store.jobs(JobQuery(pool=name, states=LIVE_STATES, limit=1_000_000))
    if jobs:
        raise Conflict(
            f"pool {name} is in use by {count_of(len(jobs), 'job')}, such as {jobs[0].id}; wait, "
            f"or cancel them: `tpu jobs --all-users pool:{name} state:live` lists them"
        )
    with reservations.no_changes(context) as lock:
        # First, so that none is left if the server stops between.
        reservations.end_all(context, name, lock)
        _commit_pool(context, name, "dropped", ChangeSet(deleted_pools=[name]))


def _commit_pool(
    context: CommandContext, name: str, state: str, change: ChangeSet, message: str = ""
) -> None:
    notice = context.message(InboxMessageKind.POOL_CHANGED, pool=name)
    event = context.pool_event(name, state, message or f"{context.caller.name} {state} it")
    context.store.commit(replace(change, messages=[notice], events=[event]))
