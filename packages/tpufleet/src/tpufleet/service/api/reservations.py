"""Reservations of pool slices, and slices held after a failure."""

from __future__ import annotations

from tpufleet.model.api_types import NewReservation, ReservationExtension, ReservationPage
from tpufleet.model.fleet.reservations import Reservation
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.users import Role
from tpufleet.service.fleet import reservations
from tpufleet.service.jobs import commands
from tpufleet.service.transport.routing import ApiCall, Param, Router

router = Router()


@router.get("/reservations", Role.VIEWER, params=(Param("all", "any value: ended ones too"),))
def list_reservations(call: ApiCall) -> ReservationPage:
    """Reservations by start: active and coming ones."""
    ended = call.query_text("all") is not None
    return ReservationPage(
        reservations=tuple(reservations.listed(call.store, call.now, ended=ended))
    )


@router.post("/reservations", Role.MEMBER, foreign=AuditAction.CREATE_RESERVATION)
def create_reservation(call: ApiCall, body: NewReservation) -> Reservation:
    """Reserve slices of a pool; repeating the same request is safe."""
    return reservations.reserve(call.context, body)


@router.patch("/reservations/{id}", Role.MEMBER, foreign=AuditAction.CHANGE_RESERVATION)
def extend_reservation(call: ApiCall, body: ReservationExtension) -> Reservation:
    """Extend a reservation."""
    return reservations.extend(call.context, call.path_param("id"), body.extend_by)


@router.delete(
    "/reservations/{id}",
    Role.MEMBER,
    params=(Param("reason", "why; required of an admin"),),
    foreign=AuditAction.DELETE_RESERVATION,
)
def end_reservation(call: ApiCall) -> Reservation:
    """Release a reservation; an admin breaks that of another user, with a reason."""
    reason = call.query_text("reason") or ""
    return reservations.end(call.context, call.path_param("id"), reason)


@router.post("/slices/{id}/release", Role.MEMBER, foreign=AuditAction.RELEASE_SLICE)
def release_held_slice(call: ApiCall) -> None:
    """Return a slice that is held after a failure to its pool."""
    commands.release_held_slice(call.context, SliceId(call.path_param("id")))
