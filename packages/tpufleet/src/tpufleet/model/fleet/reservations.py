"""Reservations: for some time, slices of a pool are kept for the jobs of one user."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

DEFAULT_DURATION = timedelta(minutes=30)
MAX_DURATION = timedelta(days=7)
MAX_AHEAD = timedelta(days=60)
KEPT_FOR = timedelta(days=30)  # after its end, for calendars


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    id: str
    pool: str
    slices: int
    owner: str
    starts_at: datetime
    ends_at: datetime
    created_at: datetime
    note: str = ""
    ended_by: str = ""  # who released or broke it before its end
    end_reason: str = ""

    def active(self, now: datetime) -> bool:
        return self.starts_at <= now < self.ends_at

    def overlaps(self, start: datetime, end: datetime) -> bool:
        return self.starts_at < end and start < self.ends_at


def most_reserved(reservations: Iterable[Reservation], start: datetime, end: datetime) -> int:
    """The most slices that are reserved at any moment between."""
    overlapping = [each for each in reservations if each.overlaps(start, end)]
    moments = {start, *(each.starts_at for each in overlapping if each.starts_at > start)}
    return max(
        sum(each.slices for each in overlapping if each.active(moment)) for moment in moments
    )
