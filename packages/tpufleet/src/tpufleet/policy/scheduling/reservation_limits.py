"""How much one user may reserve. Admins are not limited. `placement` keeps others off what is
reserved."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.reservations import Reservation, most_reserved

MAX_OPEN = 10
# Also those that were released at once: each is kept for calendars, and compared with the next.
MAX_PER_DAY = 30
MAX_AHEAD = timedelta(days=14)
PERIOD = timedelta(days=14)
MAX_IN_PERIOD = timedelta(days=7)  # of one pool


def refusal(
    wanted: Reservation, known: Sequence[Reservation], pool: Pool, now: datetime
) -> str | None:
    """Why the owner may not have it; None: it is allowed. `known` are all reservations, also those
    that have ended."""
    owner = wanted.owner
    own = [each for each in known if each.owner == owner and each.id != wanted.id]
    if wanted.starts_at - now > MAX_AHEAD:
        return f"{owner} may reserve at most {MAX_AHEAD.days} days ahead"
    if sum(each.ends_at > now for each in own) >= MAX_OPEN:
        return f"{owner} has {MAX_OPEN} reservations already; release one with `tpu reserve end`"
    made = sum(now - each.created_at < timedelta(days=1) for each in own)
    if made >= MAX_PER_DAY:
        return f"{owner} has made {made} reservations within a day, the limit; try again tomorrow"
    first, last = wanted.starts_at - PERIOD, wanted.ends_at + PERIOD
    own = [each for each in own if each.pool == pool.name and each.overlaps(first, last)]
    if pool.slices_per_user is not None:
        slices = wanted.slices + most_reserved(own, wanted.starts_at, wanted.ends_at)
        if slices > pool.slices_per_user:
            return (
                f"{owner} may hold {pool.slices_per_user} slices of pool {pool.name}, and would "
                f"have reserved {slices}"
            )
    if _most_in_period([*own, wanted]) > MAX_IN_PERIOD:
        return (
            f"{owner} may reserve pool {pool.name} for at most {MAX_IN_PERIOD.days} of any "
            f"{PERIOD.days} days, over all reservations; choose a shorter or later time"
        )
    return None


def _most_in_period(reservations: Sequence[Reservation]) -> timedelta:
    """The most reserved time in any period; the fullest begins with one or ends with one."""
    starts = {each.starts_at for each in reservations}
    starts |= {each.ends_at - PERIOD for each in reservations}
    return max(
        sum((_overlap(each, start, start + PERIOD) for each in reservations), timedelta(0))
        for start in starts
    )


def _overlap(reservation: Reservation, start: datetime, end: datetime) -> timedelta:
    length = min(reservation.ends_at, end) - max(reservation.starts_at, start)
    return max(length, timedelta(0))
