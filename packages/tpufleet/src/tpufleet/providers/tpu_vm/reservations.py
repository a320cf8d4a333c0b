"""Which reservations of Compute Engine bind what uses them to their own end.

Those that were made from a future reservation in calendar mode, and those of dense deployment; any
other is used by ordinary VMs that name it
(cloud.google.com/compute/docs/instances/about-reservation-bound-vms and reservations-consume).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec

from tpufleet.errors import BadInput, NoCapacity
from tpufleet.model.fleet import compute_reservations
from tpufleet.providers.tpu_vm.google_rest import GoogleRest

READ_INTERVAL = timedelta(minutes=10)
LATE_INTERVAL = timedelta(seconds=30)  # after its start: the time is paid for
_REFUSED = ("CANCELLED", "DECLINED", "FAILED")


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one in a zone."""

    until: datetime  # then it is read again
    binds: bool | None = None  # None: it cannot be read
    begins_at: datetime | None = None  # calendar mode has not made it yet


class ReservationReader:
    def __init__(self, rest: Callable[[], GoogleRest], project: str, reservation: str) -> None:
        self._rest = rest
        self._project = project
        self._reservation = reservation
        self._known: dict[str, Reservation] = {}  # by zone

    def begun(self, zone: str, now: datetime) -> Reservation:
        """NoCapacity until Google has made it."""
        known = self._known.get(zone)
        if known is None or now >= known.until:
            known = self._known[zone] = self._read(zone, now)
        if known.begins_at is not None:
            begin = f"begins at {known.begins_at:%Y-%m-%d %H:%M} UTC"
            message = f"reservation {self._reservation} {begin}; Google has not made it yet"
            raise NoCapacity(message, until=known.until)
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
            begins_at = begin_of(rest, scope, named.name, now)
            if begins_at is not None:
                until = min(max(begins_at, now + LATE_INTERVAL), until)
            return Reservation(until=until, begins_at=begins_at)
        if found.status != 200:
            return Reservation(until=until)
        if found.body.get("deploymentType") == "DENSE":
            return Reservation(until=until, binds=True)
        if not found.body.get("deleteAtTime"):  # as calendar mode always has
            return Reservation(until=until, binds=False)
        requests = _calendar(rest, scope)
        if requests is None:
            return Reservation(until=until)
        binds = any(_makes(request, named.name) for request in requests)
        return Reservation(until=until, binds=binds)


def begin_of(rest: GoogleRest, scope: str, name: str, now: datetime) -> datetime | None:
    """Of a reservation that calendar mode has not made yet: it does so at its start
    (cloud.google.com/compute/docs/instances/future-reservations-overview), or a little later."""
    windows = [
        _window(request)
        for request in _calendar(rest, scope) or ()
        if request.get("reservationName") == name
        and (request.get("status") or {}).get("procurementStatus") not in _REFUSED
    ]
    return min((start for start, end in windows if end > now), default=None)


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
