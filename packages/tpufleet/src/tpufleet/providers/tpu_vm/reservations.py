"""Which reservations of Compute Engine bind what uses them to their own end.

Those that were made from a future reservation in calendar mode, and those of dense deployment; any
other is used by ordinary VMs that name it
(cloud.google.com/compute/docs/instances/about-reservation-bound-vms and reservations-consume).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from tpufleet.errors import BadInput, NoCapacity
from tpufleet.model.fleet import compute_reservations
from tpufleet.providers.base import Order
from tpufleet.providers.tpu_vm.google_rest import GoogleRest

# What ends sooner is not worth a request: a host boots for 2 to 8 minutes.
LEAST_USE = timedelta(minutes=15)
READ_INTERVAL = timedelta(minutes=10)
LATE_INTERVAL = timedelta(seconds=30)  # after its start: the time is paid for
_REFUSED = ("CANCELLED", "DECLINED", "FAILED")


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one in a zone."""

    until: datetime  # then it is read again
    binds: bool | None = None  # None: it cannot be read
    begins_at: datetime | None = None  # calendar mode has not made it yet
    ends_at: datetime | None = None  # with what is bound to it


class ReservationReader:
    def __init__(self, rest: Callable[[], GoogleRest], project: str, reservation: str) -> None:
        self._rest = rest
        self._project = project
        self._reservation = reservation
        self._known: dict[str, Reservation] = {}  # by zone

    def usable(self, order: Order, now: datetime) -> Reservation:
        """NoCapacity until Google has made it, and from shortly before its end."""
        known = self.known(order.zone, now)
        why = ""
        if known.begins_at is not None:
            why = f"begins at {known.begins_at:%Y-%m-%d %H:%M} UTC; Google has not made it yet"
        elif known.ends_at is not None and now >= known.ends_at - order.grace - LEAST_USE:
            verb = "ended" if now >= known.ends_at else "ends"
            why = f"{verb} at {known.ends_at:%Y-%m-%d %H:%M} UTC"
        if why:
            raise NoCapacity(f"reservation {self._reservation} {why}", until=known.until)
        return known

    def known(self, zone: str, now: datetime) -> Reservation:
        known = self._known.get(zone)
        if known is None or now >= known.until:
            known = self._known[zone] = self._read(zone, now)
        return known

    def _read(self, zone: str, now: datetime) -> Reservation:
        until = now + READ_INTERVAL
        try:
            named = compute_reservations.parse(self._reservation)
        except BadInput:  # of a folder or an organisation, of the Cloud TPU API
            return Reservation(until=until)
        scope = f"compute/v1/projects/{named.project or self._project}/zones/{zone}"
        rest = self._rest()
        found = rest.get("compute", f"{scope}/reservations/{named.name}")
        if found.missing:
            begins_at = begin_of(spans := windows(rest, scope, named.name), now)
            if begins_at is not None:
                until = min(max(begins_at, now + LATE_INTERVAL), until)
                return Reservation(until=until, begins_at=begins_at)
            ended_at = max((end for _, end in spans), default=None)
            return Reservation(until=until, ends_at=ended_at)
        if found.status != 200:
            return Reservation(until=until)
        end = found.body.get("deleteAtTime")
        ends_at = datetime.fromisoformat(end) if end else None
        if found.body.get("deploymentType") == "DENSE":
            return Reservation(until=until, binds=True, ends_at=ends_at)
        if ends_at is None:  # calendar mode always has one
            return Reservation(until=until, binds=False)
        requests = _calendar(rest, scope)
        if requests is None:
            return Reservation(until=until)
        binds = any(_makes(request, named.name) for request in requests)
        return Reservation(until=until, binds=binds, ends_at=ends_at if binds else None)


def begin_of(spans: Sequence[tuple[datetime, datetime]], now: datetime) -> datetime | None:
    """Of a reservation that calendar mode has not made yet: it does so at its start
    (cloud.google.com/compute/docs/instances/future-reservations-overview), or a little later."""
    return min((start for start, end in spans if end > now), default=None)


def windows(rest: GoogleRest, scope: str, name: str) -> list[tuple[datetime, datetime]]:
    """Starts and ends of a reservation of calendar mode, also past ones."""
    return [
        _window(request)
        for request in _calendar(rest, scope) or ()
        if request.get("reservationName") == name
        and (request.get("status") or {}).get("procurementStatus") not in _REFUSED
    ]


def _window(request: Mapping[str, Any]) -> tuple[datetime, datetime]:
    window = request["timeWindow"]
    start = datetime.fromisoformat(window["startTime"])
    if window.get("endTime"):
        return start, datetime.fromisoformat(window["endTime"])
    return start, start + timedelta(seconds=int(window["duration"]["seconds"]))


def _calendar(rest: GoogleRest, scope: str) -> list[Mapping[str, Any]] | None:
    found: list[Mapping[str, Any]] = []
    for answer in rest.pages("compute", f"{scope}/futureReservations"):
        if answer.status != 200:
            return None
        found += answer.body.get("items", ())
    return [each for each in found if each.get("reservationMode") == "CALENDAR"]


def _makes(request: Mapping[str, Any], reservation: str) -> bool:
    made = (request.get("status") or {}).get("autoCreatedReservations", ())
    return reservation in [url.rpartition("/")[2] for url in made]
