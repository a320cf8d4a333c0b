"""Scaling a pool between its smallest and its largest size."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice


def surplus_slices(
    pool: Pool | None, slices: Sequence[TpuSlice], now: datetime, settings: str = ""
) -> list[SliceId]:
    """Idle slices to release: idle for too long and above `smallest`, of a deleted pool, or what
    the pool provided before it was changed. `settings`: see `Pool.provides`.

    An unused doomed slice is released at once. An adopted node stays until it is unregistered, or
    its pool is deleted or gets another type.
    """
    idle = sorted(
        (
            item
            for item in slices
            if item.live
            and item.job_id is None
            and (not item.is_reserved(now) or item.state is SliceState.DOOMED)
        ),
        key=lambda item: item.idle_since or item.requested_at,
    )
    if pool is None:
        return [item.id for item in idle]
    unusable = [
        item.id
        for item in idle
        if item.state is SliceState.DOOMED or not pool.provides(item, settings)
    ]
    over = max(0, sum(1 for item in slices if item.live) - len(unusable) - pool.largest)
    ready = [
        item
        for item in idle
        if item.state is SliceState.READY and not item.adopted and pool.provides(item, settings)
    ]
    expired = [
        item.id
        for item in ready
        if now - (item.idle_since or item.ready_at or now) >= pool.idle_after
    ]
    release = expired[: max(0, _lasting(pool, slices, settings) - pool.smallest)]
    release += [item.id for item in ready if item.id not in release][: max(0, over - len(release))]
    return unusable + release


def next_surplus_at(pool: Pool, slices: Sequence[TpuSlice], settings: str = "") -> datetime | None:
    """When the next idle slice will have been idle for `idle_after`, or is no longer held for
    someone although the pool was changed."""
    ready = [item for item in slices if item.state is SliceState.READY]
    moments = [
        item.reserved_until
        for item in ready
        if item.job_id is None and item.reserved_until and not pool.provides(item, settings)
    ]
    lasting = [item for item in ready if pool.provides(item, settings)]
    if len(lasting) > pool.smallest:
        moments += [
            item.idle_since + pool.idle_after
            for item in lasting
            if item.job_id is None and item.idle_since and not item.adopted
        ]
    return min(moments, default=None)


def shortfall(pool: Pool, slices: Sequence[TpuSlice], settings: str = "") -> int:
    """How many slices to request: up to `smallest`, within `largest`."""
    room = pool.largest - sum(1 for item in slices if not item.fenced)
    return max(0, min(pool.smallest - _lasting(pool, slices, settings), room))


def _lasting(pool: Pool, slices: Sequence[TpuSlice], settings: str) -> int:
    return sum(
        1
        for item in slices
        if item.live and item.state is not SliceState.DOOMED and pool.provides(item, settings)
    )
