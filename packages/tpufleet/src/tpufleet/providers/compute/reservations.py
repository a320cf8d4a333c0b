"""Which provisioning model a reservation takes.

VMs can be bound to one that was made from a future reservation in calendar mode, or one of dense
deployment; any other takes ordinary VMs that name it
(cloud.google.com/compute/docs/instances/about-reservation-bound-vms and reservations-consume).
"""

from __future__ import annotations

from datetime import datetime, timedelta

from tpufleet.errors import BadRequest, PermissionMissing
from tpufleet.model.fleet import compute_reservations
from tpufleet.providers.compute import naming
from tpufleet.providers.compute.api import ComputeApi
from tpufleet.providers.compute.naming import Location

READ_INTERVAL = timedelta(minutes=10)


class ReservationReader:
    def __init__(self, api: ComputeApi, reservation: str) -> None:
        self._api = api
        self._reservation = reservation
        self._known: dict[str, tuple[datetime, bool]] = {}  # by zone

    def binds(self, location: Location, now: datetime) -> bool:
        """Whether its VMs are bound to it. What cannot be read is taken for one that does, as
        Google's page of TPUs assumes."""
        known = self._known.get(location.zone)
        if known is None or now - known[0] >= READ_INTERVAL:
            known = self._known[location.zone] = (now, self._read(location))
        return known[1]

    def _read(self, location: Location) -> bool:
        named = compute_reservations.parse(self._reservation)
        scope = f"projects/{named.project or location.project}/zones/{location.zone}"
        try:
            found = self._api.get(f"{scope}/reservations/{named.name}")
            if found is None or found.get("deploymentType") == "DENSE":
                return True
            if not found.get("deleteAtTime"):  # as calendar mode always has
                return False
            requests = self._api.future_reservations(scope)
        except (PermissionMissing, BadRequest):
            return True
        return any(
            request.get("reservationMode") == "CALENDAR"
            and named.name in map(naming.short, _made(request))
            for request in requests
        )


def _made(request: dict[str, object]) -> list[str]:
    status = request.get("status")
    return status.get("autoCreatedReservations", []) if isinstance(status, dict) else []
