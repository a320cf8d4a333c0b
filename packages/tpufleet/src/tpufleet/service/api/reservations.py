"""Reservations of pool slices, and slices held after a failure."""

from __future__ import annotations

from tpufleet.model.api_types import (
    Acknowledgement,
    NewReservation,
    ReservationExtension,
    ReservationPage,
)
from tpufleet.model.fleet.reservations import Reservation
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.users import Role
from tpufleet.service.fleet import reservations
from tpufleet.service.jobs import commands
from tpufleet.service.transport.routing import ApiCall, Param, Router

router = Router()


@router.route(
    "GET",
    "/reservations",
    role=Role.VIEWER,
    response=ReservationPage,
    params=(Param("all", "any value: ended ones too"),),
)
def list_reservations(call: ApiCall) -> ReservationPage:
    """Reservations by start: active and coming ones."""
    ended = call.query_text("all") is not None
    return ReservationPage(
        reservations=tuple(reservations.listed(call.store, call.now, ended=ended))
    )


@router.route(
    "POST",
    "/reservations",
    role=Role.MEMBER,
    body=NewReservation,
    response=Reservation,
    foreign_action=AuditAction.CREATE_RESERVATION,
)
def create_reservation(call: ApiCall) -> Reservation:
    """Reserve slices of a pool; repeating the same request is safe."""
    reservation = reservations.reserve(call.context, call.parse_body(NewReservation))
    call.notify()
    return reservation


@router.route(
    "PATCH",
    "/reservations/{id}",
    role=Role.MEMBER,
    body=ReservationExtension,
    response=Reservation,
    foreign_action=AuditAction.CHANGE_RESERVATION,
)
def extend_reservation(call: ApiCall) -> Reservation:
    """Extend a reservation."""
    by = call.parse_body(ReservationExtension).extend_by
    reservation = reservations.extend(call.context, call.path_param("id"), by)
    call.notify()
    return reservation


@router.route(
    "DELETE",
    "/reservations/{id}",
    role=Role.MEMBER,
    response=Reservation,
    params=(Param("reason", "why; required of an admin"),),
    foreign_action=AuditAction.DELETE_RESERVATION,
)
def end_reservation(call: ApiCall) -> Reservation:
    """Release a reservation; an admin breaks that of another user, with a reason."""
    reason = call.query_text("reason") or ""
    reservation = reservations.end(call.context, call.path_param("id"), reason)
    call.notify()
    return reservation


@router.route(
    "POST",
    "/slices/{id}/release",
    role=Role.MEMBER,
    response=Acknowledgement,
    foreign_action=AuditAction.RELEASE_SLICE,
)
def release_held_slice(call: ApiCall) -> Acknowledgement:
    """Return a slice that is held after a failure to its pool."""
    commands.release_held_slice(call.context, SliceId(call.path_param("id")))
    call.notify()
    return Acknowledgement()
