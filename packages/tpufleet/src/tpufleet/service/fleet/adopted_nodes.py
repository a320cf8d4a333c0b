"""Nodes that people made: adopt one as a slice of a pool, and give it back."""

from __future__ import annotations

import secrets

from tpufleet.errors import BadInput, Conflict, not_found
from tpufleet.model.api_types import AdoptRequest
from tpufleet.model.fleet import fleets
from tpufleet.model.fleet.slices import ADOPTING_PROVIDERS, SliceId, SliceState, TpuSlice
from tpufleet.model.inbox import InboxMessageKind
from tpufleet.service.jobs.commands import CommandContext
from tpufleet.service.lookups import require_pool
from tpufleet.stores.base import ChangeSet

# A name is at most 63 characters long, also as a label, with a suffix of 7.
_MAX_STEM = 56


def adopt(context: CommandContext, request: AdoptRequest) -> SliceId:
    """The slice that it becomes. Idempotent. The controller asks the provider, which refuses what
    cannot work."""
    store = context.store
    fleets.check_name(request.node)
    fleets.check_zone(request.zone)
    pool = require_pool(store, request.pool)
    if pool.provider not in ADOPTING_PROVIDERS:
        raise BadInput(
            f"pool {pool.name} is of the provider {pool.provider}; only pools of "
            f"{', '.join(sorted(ADOPTING_PROVIDERS))} can adopt TPU VMs"
        )
    for each in store.slices():
        if each.zone != request.zone or request.node not in (each.id, each.node):
            continue
        if not each.adopted:
            raise _created_here(each.id)
        if each.state is SliceState.RELEASING:
            raise Conflict(f"{each.node} is being given back; try again in a minute")
        if each.pool != pool.name:
            raise Conflict(
                f"{each.node} is in pool {each.pool}; run `tpu adopt undo {each.node}` first"
            )
        return each.id
    # A new id each time: a slice that is gone never comes back, and no node has its name.
    slice_id = SliceId(f"{request.node[:_MAX_STEM].rstrip('-')}-{secrets.token_hex(3)}")
    message = context.message(
        InboxMessageKind.ADOPT,
        slice_id=slice_id,
        pool=pool.name,
        node=request.node,
        zone=request.zone,
    )
    store.commit(ChangeSet(messages=[message]))
    return slice_id


def unregister(context: CommandContext, name: str) -> None:
    """By the name of the node or of its slice. Idempotent."""
    tpu_slice = _find(context, name)
    if tpu_slice.job_id is not None:
        raise Conflict(
            f"job {tpu_slice.job_id} runs on {tpu_slice.node}; wait for its end, or run "
            f"`tpu cancel {tpu_slice.job_id}`"
        )
    message = context.message(InboxMessageKind.UNREGISTER, slice_id=tpu_slice.id)
    context.store.commit(ChangeSet(messages=[message]))


def _created_here(name: str) -> Conflict:
    return Conflict(
        f"{name} was created by this server, which deletes it when its pool or job no longer needs "
        "it; only TPU VMs that people made are adopted and given back"
    )


def _find(context: CommandContext, name: str) -> TpuSlice:
    slices = context.store.slices()
    matches = [each for each in slices if each.adopted and name in (each.id, each.node)]
    if len(matches) > 1:
        known = ", ".join(f"{each.id} in {each.zone}" for each in matches)
        raise BadInput(f"several TPU VMs are named {name}: {known}; pass the name of the slice")
    if matches:
        return matches[0]
    if any(each.id == name for each in slices):
        raise _created_here(name)
    raise not_found("adopted node", name, "inventory")
