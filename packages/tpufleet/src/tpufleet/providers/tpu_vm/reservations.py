"""Which reservations of Compute Engine bind what uses them to their own end.

Those that were made from a future reservation in calendar mode, and those of dense deployment; any
other is used by ordinary VMs that name it
(cloud.google.com/compute/docs/instances/about-reservation-bound-vms and reservations-consume).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.model.fleet import compute_reservations
from tpufleet.providers.tpu_vm.google_rest import GoogleRest

READ_INTERVAL = timedelta(minutes=10)


class ReservationReader:
    def __init__(self, rest: Callable[[], GoogleRest], project: str, reservation: str) -> None:
        self._rest = rest
        self._project = project
        self._reservation = reservation
        self._known: dict[str, tuple[datetime, bool | None]] = {}  # by zone

    def binds(self, zone: str, now: datetime) -> bool | None:
        """None if it cannot be read."""
        known = self._known.get(zone)
        if known is None or now - known[0] >= READ_INTERVAL:
            known = self._known[zone] = (now, self._read(zone))
        return known[1]

    def _read(self, zone: str) -> bool | None:
        try:
            named = compute_reservations.parse(self._reservation)
        except BadInput:  # of a folder or an organisation, of the Cloud TPU API
            return None
        scope = f"compute/v1/projects/{named.project or self._project}/zones/{zone}"
        rest = self._rest()
        found = rest.get("compute", f"{scope}/reservations/{named.name}")
        if found.status != 200:
            return None
        if found.body.get("deploymentType") == "DENSE":
            return True
        if not found.body.get("deleteAtTime"):  # as calendar mode always has
            return False
        for answer in rest.pages("compute", f"{scope}/futureReservations"):
            if answer.status != 200:
                return None
            if any(_made_by(request, named.name) for request in answer.body.get("items", ())):
                return True
        return False


def _made_by(request: Mapping[str, Any], reservation: str) -> bool:
    made = (request.get("status") or {}).get("autoCreatedReservations", ())
    calendar = request.get("reservationMode") == "CALENDAR"
    return calendar and reservation in [url.rpartition("/")[2] for url in made]
