"""Pools, users and slices that requests name. Each raises NotFound with what to try instead."""

from __future__ import annotations

from collections.abc import Iterable

from tpufleet.errors import BadInput, Forbidden, NotFound
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice
from tpufleet.model.people.users import User
from tpufleet.model.tpu import type_lookup
from tpufleet.service.transport import identifiers
from tpufleet.stores.base import Store


def require_pool(store: Store, name: str) -> Pool:
    pool = store.pool(name)
    if pool is None:
        raise NotFound(not_found("pool", name, (each.name for each in store.pools()), "pool list"))
    return pool


def require_member(pool: Pool, user: str, *, is_admin: bool, field: str = "") -> None:
    if not pool.admits(user, is_admin=is_admin):
        raise Forbidden(
            f"{field}{user} is not a member of {pool.name}; an admin can change its members"
        )


def require_user(store: Store, name: str) -> User:
    user = store.user(name)
    if user is None:
        raise NotFound(not_found("user", name, (each.name for each in store.users()), "user list"))
    return user


def require_slice(store: Store, slice_id: SliceId, *, live: bool = False) -> TpuSlice:
    tpu_slice = store.slice(slice_id)
    if tpu_slice is None or (live and tpu_slice.state is SliceState.GONE):
        raise NotFound(not_found("slice", slice_id, (each.id for each in store.slices()), "slices"))
    return tpu_slice


def require_host_index(tpu_slice: TpuSlice, index: int | None) -> None:
    """None is every host."""
    count = type_lookup.find(tpu_slice.accelerator).hosts
    if index is not None and not 0 <= index < count:
        raise BadInput(f"host: slice {tpu_slice.id} has hosts 0 to {count - 1}, not {index}")


def not_found(kind: str, name: str, known: Iterable[str], command: str) -> str:
    near = identifiers.suggestion(name, known)
    return f"no {kind} named {name[:80]!r}{near}; list them with `tpu {command}`"
