"""Pools, users and slices that requests name. Each raises NotFound with what to try instead."""

from __future__ import annotations

from tpufleet.errors import Forbidden, no_such_host, not_found
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice
from tpufleet.model.people.users import User
from tpufleet.model.tpu import type_lookup
from tpufleet.stores.base import Store


def require_pool(store: Store, name: str) -> Pool:
    pool = store.pool(name)
    if pool is None:
        raise not_found("pool", name, "pool list", (each.name for each in store.pools()))
    return pool


def require_member(pool: Pool, user: str, *, is_admin: bool, field: str = "") -> None:
    if not pool.admits(user, is_admin=is_admin):
        raise Forbidden(f"{field}{pool.excludes(user)}")


def require_user(store: Store, name: str) -> User:
    user = store.user(name)
    if user is None:
        raise not_found("user", name, "user list", (each.name for each in store.users()))
    return user


def require_slice(store: Store, slice_id: SliceId, *, live: bool = False) -> TpuSlice:
    tpu_slice = store.slice(slice_id)
    if tpu_slice is None or (live and tpu_slice.state is SliceState.GONE):
        raise not_found("slice", slice_id, "inventory slices", (each.id for each in store.slices()))
    return tpu_slice


def require_host_index(tpu_slice: TpuSlice, index: int | None) -> None:
    """None is every host."""
    count = type_lookup.find(tpu_slice.accelerator).hosts
    if index is not None and not 0 <= index < count:
        raise no_such_host(f"slice {tpu_slice.id}", count, index)
