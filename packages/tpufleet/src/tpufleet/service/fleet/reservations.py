"""Commands on reservations. Placement honours them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta

from tpufleet.errors import BadInput, Conflict, Fenced, not_found
from tpufleet.model import identifiers
from tpufleet.model.api_types import NewReservation
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.reservations import (
    KEPT_FOR,
    MAX_AHEAD,
    MAX_DURATION,
    Reservation,
    most_reserved,
)
from tpufleet.model.inbox import InboxMessageKind
from tpufleet.model.people.users import Role
from tpufleet.policy.scheduling import reservation_limits
from tpufleet.service import leases
from tpufleet.service.jobs.commands import CommandContext
from tpufleet.service.lookups import require_member, require_pool
from tpufleet.stores.base import ChangeSet, Lease, Store

_LEASE = "reservations"
MIN_DURATION = timedelta(minutes=1)
MAX_LATE = timedelta(minutes=5)  # of a request that took a while
_LEASE_TTL = timedelta(seconds=30)
_WAIT_SECONDS = 2.0


def listed(store: Store, now: datetime, *, ended: bool = False) -> list[Reservation]:
    """By start. Ended ones are kept for calendars."""
    known = store.documents(Reservation)
    chosen = [each for each in known if ended or each.ends_at > now]
    return sorted(chosen, key=lambda each: (each.starts_at, each.id))


def reserve(context: CommandContext, new: NewReservation) -> Reservation:
    """Idempotent: the id is in the request. Conflict when the pool has fewer slices left."""
    now, store = context.now, context.store
    identifiers.parse_job_id(new.id)
    pool = _find_pool(context, new.pool)
    starts_at = max(new.starts_at or now, now)
    identifiers.check_range("starts_at: from now", starts_at - now, timedelta(0), MAX_AHEAD)
    identifiers.check_range("duration", new.duration, MIN_DURATION, MAX_DURATION)
    identifiers.check_text("note", new.note, 500)
    slices = _default_slices(context, pool) if new.slices is None else new.slices
    identifiers.check_range("slices", slices, 1, pool.largest)
    reservation = Reservation(
        id=new.id,
        pool=pool.name,
        slices=slices,
        owner=context.caller.name,
        starts_at=starts_at,
        ends_at=starts_at + new.duration,
        created_at=now,
        note=new.note,
    )
    with no_changes(context) as lock:
        known = store.document(Reservation, new.id)
        if known is not None:
            if (known.owner, known.pool) != (reservation.owner, reservation.pool):
                raise Conflict(f"reservation id {new.id} is in use; choose another id")
            return known
        pool = _find_pool(context, new.pool)  # it may have been deleted meanwhile
        if new.starts_at is not None and now - new.starts_at > MAX_LATE:
            raise BadInput(f"starts_at: {new.starts_at:%Y-%m-%d %H:%M} UTC has passed")
        _require_allowed(context, pool, reservation)
        _require_room(store, pool, reservation)
        _save(store, reservation, lock)
        _forget_old(store, now)
    _announce(
        context, reservation, "reserved", f"{reservation.owner} reserved {_what(reservation)}"
    )
    return reservation


def extend(context: CommandContext, reservation_id: str, by: timedelta) -> Reservation:
    identifiers.check_range("duration", by, MIN_DURATION, MAX_DURATION)
    with no_changes(context) as lock:
        reservation = find(context.store, reservation_id)
        context.caller.require_owner(reservation.owner, f"reservation {reservation.id}")
        if reservation.ends_at <= context.now:
            raise Conflict(f"reservation {reservation.id} has ended; make a new one")
        pool = _find_pool(context, reservation.pool)
        extended = replace(reservation, ends_at=reservation.ends_at + by)
        left = extended.ends_at - max(extended.starts_at, context.now)
        identifiers.check_range("duration", left, MIN_DURATION, MAX_DURATION)
        _require_allowed(context, pool, extended)
        _require_room(context.store, pool, extended)
        _save(context.store, extended, lock)
    _announce(context, extended, "reserved", f"{context.caller.name} extended {_what(extended)}")
    return extended


def _save(store: Store, changed: Reservation, lock: Lease) -> None:
    owner = changed.owner
    store.update_document(
        Reservation, changed.id, lambda _: changed, fence=lock, required_user=owner
    )


def end(context: CommandContext, reservation_id: str, reason: str) -> Reservation:
    """Released by its owner, or broken by an admin, who must say why."""
    with no_changes(context) as lock:
        return _end(context, reservation_id, reason, lock)


def end_all(context: CommandContext, pool: str, lock: Lease) -> None:
    """Those of a pool that is deleted. `lock`: of `no_changes`."""
    lasting = [each for each in listed(context.store, context.now) if each.pool == pool]
    _end_each(context, lasting, f"pool {pool} was deleted", lock)


def end_of_user(context: CommandContext, owner: str) -> None:
    """Those of a user who was deleted, so that none is made or extended meanwhile."""
    lasting = [each for each in listed(context.store, context.now) if each.owner == owner]
    _end_each(context, lasting, f"user {owner} was deleted")


def end_of_former_members(context: CommandContext, pool: Pool) -> None:
    """Those of users who may no longer use the pool: nobody could use their slices."""
    admins = {user.name for user in context.store.users() if user.role is Role.ADMIN}
    for each in listed(context.store, context.now):
        if each.pool == pool.name and not pool.admits(each.owner, is_admin=each.owner in admins):
            reason = f"{each.owner} is no longer a member of pool {pool.name}"
            _end_each(context, [each], reason)


def _end_each(
    context: CommandContext,
    reservations: Iterable[Reservation],
    reason: str,
    lock: Lease | None = None,
) -> None:
    for each in reservations:
        _finish(context, each, reason, lock)
        _announce(context, each, "released", f"the reservation of {each.owner} has ended: {reason}")


def _finish(
    context: CommandContext, reservation: Reservation, reason: str, lock: Lease | None = None
) -> Reservation:
    ended = replace(
        reservation,
        starts_at=min(reservation.starts_at, context.now),
        ends_at=context.now,
        ended_by=context.caller.name,
        end_reason=reason[:500],
    )
    context.store.update_document(Reservation, ended.id, lambda _: ended, fence=lock)
    return ended


def _end(context: CommandContext, reservation_id: str, reason: str, lock: Lease) -> Reservation:
    reservation = find(context.store, reservation_id)
    mine = reservation.owner == context.caller.name
    context.caller.require_reason(reservation.owner, reason)
    context.caller.require_owner(reservation.owner, f"reservation {reservation.id}")
    if reservation.ends_at <= context.now:
        return reservation
    verb = "released" if mine else "broke"
    ended = _finish(context, reservation, reason, lock)
    why = f": {reason[:500]}" if reason else ""
    message = f"{context.caller.name} {verb} the reservation of {reservation.owner}{why}"
    _announce(context, ended, "released", message)
    return ended


def find(store: Store, reservation_id: str) -> Reservation:
    reservation = store.document(Reservation, reservation_id)
    if reservation is None:
        known = [
            each for each in store.documents(Reservation) if each.id.startswith(reservation_id)
        ]
        if len(known) == 1 and reservation_id:
            return known[0]
        raise not_found("reservation", reservation_id, "reserve list")
    return reservation


def _find_pool(context: CommandContext, name: str) -> Pool:
    pool = require_pool(context.store, name)
    require_member(pool, context.caller.name, is_admin=context.caller.is_admin)
    return pool


def _default_slices(context: CommandContext, pool: Pool) -> int:
    """All that the caller may have."""
    if pool.slices_per_user is None or context.caller.is_admin:
        return pool.largest
    return min(pool.largest, pool.slices_per_user)


def _require_allowed(context: CommandContext, pool: Pool, wanted: Reservation) -> None:
    if context.caller.is_admin:
        return
    known = context.store.documents(Reservation)
    if message := reservation_limits.refusal(wanted, known, pool, context.now):
        raise Conflict(message)


def _require_room(store: Store, pool: Pool, wanted: Reservation) -> None:
    others = [
        each
        for each in store.documents(Reservation)
        if each.pool == pool.name and each.id != wanted.id
    ]
    left = pool.largest - most_reserved(others, wanted.starts_at, wanted.ends_at)
    if wanted.slices > left:
        overlapping = [each for each in others if each.overlaps(wanted.starts_at, wanted.ends_at)]
        first = min(overlapping, key=lambda each: each.starts_at, default=None)
        taken = f": {first.owner} reserved {_what(first)}" if first is not None else ""
        note = f" ({first.note})" if first is not None and first.note else ""
        raise Conflict(
            f"pool {pool.name} has {max(0, left)} of {pool.largest} slices left to reserve then, "
            f"not {wanted.slices}{taken}{note}"
        )


@contextlib.contextmanager
def no_changes(context: CommandContext) -> Iterator[Lease]:
    """One change at a time, so that two cannot take the last slice. One that outlives its lease,
    since the server was frozen, changes nothing."""
    busy = Conflict("another reservation is being made; try again")
    deadline = time.monotonic() + _WAIT_SECONDS
    try:
        with leases.hold(context.store, _LEASE, _LEASE_TTL, context.now, deadline, busy) as lease:
            yield lease
    except Fenced as error:
        raise busy from error


def _forget_old(store: Store, now: datetime) -> None:
    for each in store.documents(Reservation):
        if now - each.ends_at > KEPT_FOR:
            store.update_document(Reservation, each.id, lambda _: None)


def _what(reservation: Reservation) -> str:
    noun = "slice" if reservation.slices == 1 else "slices"
    start, end = reservation.starts_at, reservation.ends_at
    return f"{reservation.slices} {noun} from {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC"


def _announce(context: CommandContext, changed: Reservation, state: str, message: str) -> None:
    event = context.pool_event(changed.pool, state, message, data={"reservation": changed.id})
    notice = context.message(InboxMessageKind.RESERVED, pool=changed.pool)
    context.store.commit(ChangeSet(messages=[notice], events=[event]))
