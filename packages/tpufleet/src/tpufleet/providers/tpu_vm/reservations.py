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

from tpufleet.errors import BadInput
from tpufleet.model.fleet import compute_reservations
from tpufleet.providers.tpu_vm.google_rest import GoogleRest

READ_INTERVAL = timedelta(minutes=10)


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one in a zone."""

    read_at: datetime
    binds: bool | None = None  # None: it cannot be read
    begins_at: datetime | None = None  # calendar mode makes it then


class ReservationReader:
    def __init__(self, rest: Callable[[], GoogleRest], project: str, reservation: str) -> None:
        self._rest = rest
        self._project = project
        self._reservation = reservation
        self._known: dict[str, Reservation] = {}  # by zone

    def get(self, zone: str, now: datetime) -> Reservation:
        known = self._known.get(zone)
        if known is None or now - known.read_at >= READ_INTERVAL:
            known = self._known[zone] = self._read(zone, now)
        return known

    def _read(self, zone: str, now: datetime) -> Reservation:
        try:
            named = compute_reservations.parse(self._reservation)
        except BadInput:  # of a folder or an organisation, of the Cloud TPU API
            return Reservation(read_at=now)
        scope = f"compute/v1/projects/{named.project or self._project}/zones/{zone}"
        rest = self._rest()
        found = rest.get("compute", f"{scope}/reservations/{named.name}")
        if found.missing:
            begins_at = begin_of(rest, scope, named.name, now)
            binds = True if begins_at else None
            return Reservation(read_at=now, binds=binds, begins_at=begins_at)
        if found.status != 200:
            return Reservation(read_at=now)
        if found.body.get("deploymentType") == "DENSE":
            return Reservation(read_at=now, binds=True)
        if not found.body.get("deleteAtTime"):  # as calendar mode always has
            return Reservation(read_at=now, binds=False)
        requests = _calendar(rest, scope)
        if requests is None:
            return Reservation(read_at=now)
        binds = any(_makes(request, named.name) for request in requests)
        return Reservation(read_at=now, binds=binds)


def begin_of(rest: GoogleRest, scope: str, name: str, now: datetime) -> datetime | None:
    """Of a reservation that calendar mode has not made yet: it does so at its start
    (cloud.google.com/compute/docs/instances/future-reservations-overview)."""
    starts = [
        datetime.fromisoformat(request["timeWindow"]["startTime"])
        for request in _calendar(rest, scope) or ()
        if request.get("reservationName") == name
    ]
    return min((start for start in starts if start > now), default=None)


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
