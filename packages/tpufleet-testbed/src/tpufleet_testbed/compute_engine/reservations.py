"""Reservations of the emulated Compute Engine, and future reservations in calendar mode."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from tpufleet.clocks import Clock
from tpufleet_testbed.compute_engine import catalog
from tpufleet_testbed.compute_engine.api_errors import (
    ErrorBody,
    call_error,
    invalid,
    invalid_field,
    operation_error,
    required,
)
from tpufleet_testbed.compute_engine.capacity import Want
from tpufleet_testbed.compute_engine.fault_plan import ComputeFaultPlan, Switches
from tpufleet_testbed.compute_engine.operations import timestamp
from tpufleet_testbed.compute_engine.records import Vm
from tpufleet_testbed.compute_engine.views import link
from tpufleet_testbed.timeline import Action


class Engine(Protocol):
    """What reservations need of the engine."""

    clock: Clock
    plan: ComputeFaultPlan
    switches: Switches
    started_at: datetime
    vms: dict[tuple[str, str], Vm]

    def number(self) -> int: ...
    def schedule(self, at: datetime, action: Action) -> None: ...
    def after(self, at: datetime, kind: str, key: str, action: Action) -> None: ...
    def stop(self, vm: Vm, at: datetime, reason: str) -> None: ...


@dataclass(slots=True, eq=False)
class Reservation:
    name: str
    zone: str
    project: str
    number: int
    machine: str
    vms: int
    starts_at: datetime
    ends_at: datetime | None = None
    calendar: str = ""  # the future reservation that created it
    share: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class FutureReservation:
    name: str
    zone: str
    project: str
    number: int
    body: dict[str, Any]
    reservation: Reservation
    created_at: datetime


class Reservations:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.known: dict[tuple[str, str], Reservation] = {}  # by zone and name
        self.future: dict[tuple[str, str], FutureReservation] = {}
        start = engine.started_at
        for each in engine.plan.reservations:
            reservation = Reservation(
                name=each.name, zone=each.zone, project="", number=engine.number(),
                machine=each.machine, vms=each.vms, starts_at=start + each.after,
            )  # fmt: skip
            if each.until is not None:
                reservation.ends_at, reservation.calendar = start + each.until, each.name
                self.future[each.zone, each.name] = FutureReservation(
                    name=each.name, zone=each.zone, project="", number=engine.number(),
                    body={
                        "name": each.name, "reservationMode": "CALENDAR",
                        "reservationName": each.name,
                        "timeWindow": {
                            "startTime": timestamp(reservation.starts_at),
                            "endTime": timestamp(reservation.ends_at),
                        },
                    },
                    reservation=reservation, created_at=start,
                )  # fmt: skip
            self._add(reservation)

    def _add(self, reservation: Reservation) -> None:
        """One of calendar mode is made when it starts, at the earliest."""

        def begin(at: datetime) -> None:
            self.known[reservation.zone, reservation.name] = reservation

        if not reservation.calendar or reservation.starts_at <= self._engine.clock.now():
            begin(reservation.starts_at)
        else:
            self._engine.after(reservation.starts_at, "reservation", reservation.name, begin)
        if reservation.ends_at is not None:
            self._engine.schedule(reservation.ends_at, lambda at: self._end(reservation, at))

    def _end(self, reservation: Reservation, at: datetime) -> None:
        """VMs that use it end with it."""
        for vm in self._users(reservation):
            self._engine.stop(vm, at, "expired")
        self.known.pop((reservation.zone, reservation.name), None)

    def end_of(self, zone: str, name: str) -> datetime | None:
        found = self.known.get((zone, name))
        return found.ends_at if found is not None else None

    def _users(self, reservation: Reservation) -> list[Vm]:
        return [
            vm
            for vm in self._engine.vms.values()
            if vm.has_machine and (vm.zone, vm.reservation) == (reservation.zone, reservation.name)
        ]

    def refusal(self, want: Want) -> ErrorBody | None:
        found = self.known.get((want.zone, want.reservation))
        if found is None:
            return operation_error("reservation-missing", **want.texts)
        if self._engine.clock.now() < found.starts_at:
            return operation_error("reservation-not-ready", **want.texts)
        bound = want.model == "RESERVATION_BOUND"
        fits = (
            bound if found.calendar else not bound or self._engine.switches.bound_to_any_reservation
        )
        if found.machine != want.machine.name or not fits:
            return operation_error("reservation-mismatch", **want.texts)
        if len(self._users(found)) + want.count > found.vms:
            return operation_error("reservation-full", **want.texts)
        return None

    # The API
    def create(self, project: str, zone: str, body: dict[str, Any]) -> int:
        specific = body.get("specificReservation") or {}
        properties = specific.get("instanceProperties") or {}
        machine = str(properties.get("machineType", ""))
        if not int(specific.get("count") or 0):
            raise required("resource.specificReservation.count")
        self._check_machine(machine, zone, "resource.specificReservation.instanceProperties")
        reservation = Reservation(
            name=body["name"], zone=zone, project=project, number=self._engine.number(),
            machine=machine, vms=int(specific["count"]), starts_at=self._engine.clock.now(),
            share=body.get("shareSettings") or {},
        )  # fmt: skip
        self._add(reservation)
        return reservation.number

    def get(self, project: str, zone: str, name: str) -> Reservation:
        found = self.known.get((zone, name))
        if found is None:
            target = f"projects/{project}/zones/{zone}/reservations/{name}"
            raise call_error("not-found", target=target)
        return found

    def delete(self, reservation: Reservation) -> None:
        if reservation.calendar:
            raise invalid(
                f"The reservation {reservation.name} was created by a future reservation in "
                "calendar mode and cannot be deleted before its end."
            )
        if users := self._users(reservation):
            raise call_error(
                "in-use", kind="reservation", target=reservation.name, user=users[0].name
            )
        del self.known[reservation.zone, reservation.name]

    def to_api(self, reservation: Reservation, project: str) -> dict[str, Any]:
        scope = f"zones/{reservation.zone}"
        ready = self._engine.clock.now() >= reservation.starts_at
        shown: dict[str, Any] = {
            "kind": "compute#reservation", "id": str(reservation.number),
            "name": reservation.name, "zone": link(project, scope),
            "selfLink": link(project, f"{scope}/reservations/{reservation.name}"),
            "creationTimestamp": timestamp(min(self._engine.clock.now(), reservation.starts_at)),
            "status": "READY" if ready else "CREATING",
            "specificReservationRequired": True,
            "shareSettings": reservation.share or {"shareType": "LOCAL"},
            "specificReservation": {
                "count": str(reservation.vms), "assuredCount": str(reservation.vms),
                "inUseCount": str(len(self._users(reservation))),
                "instanceProperties": {"machineType": reservation.machine},
            },
        }  # fmt: skip
        if reservation.ends_at is not None:
            shown["deleteAtTime"] = timestamp(reservation.ends_at)
        return shown

    # Calendar mode
    def create_future(self, project: str, zone: str, body: dict[str, Any]) -> int:
        engine = self._engine
        now = engine.clock.now()
        sku = body.get("specificSkuProperties") or {}
        machine = str((sku.get("instanceProperties") or {}).get("machineType", ""))
        count = int(sku.get("totalCount") or 0)
        if body.get("reservationMode") != "CALENDAR":
            raise invalid_field("resource.reservationMode", body.get("reservationMode", ""))
        if not count:
            raise required("resource.specificSkuProperties.totalCount")
        self._check_machine(machine, zone, "resource.specificSkuProperties.instanceProperties")
        kind = catalog.machines()[machine]
        if zone not in catalog.DATA["calendar_zones"].get(kind.generation.name, ()):
            raise invalid_field("zone", zone, f"Calendar mode does not offer {machine} there.")
        chips = count * kind.chips
        if chips > catalog.LIMITS["calendar_chips"] or chips & (chips - 1):
            raise invalid_field(
                "resource.specificSkuProperties.totalCount", count,
                "The number of TPU chips must be a power of two up to 1024.",
            )  # fmt: skip
        window = body.get("timeWindow") or {}
        start = _time(window, "startTime")
        seconds = (window.get("duration") or {}).get("seconds")
        end = start + timedelta(seconds=int(seconds)) if seconds else _time(window, "endTime")
        shortest, longest = (timedelta(days=days) for days in catalog.LIMITS["calendar_days"])
        if not shortest <= end - start <= longest:
            raise invalid_field("resource.timeWindow", f"{end - start}", "1 to 90 days.")
        if start <= now:
            raise invalid_field("resource.timeWindow.startTime", timestamp(start), "In the past.")
        reservation = Reservation(
            name=body.get("reservationName") or f"{body['name']}-reservation",
            zone=zone, project=project, number=engine.number(), machine=machine, vms=count,
            starts_at=start, ends_at=end, calendar=body["name"],
        )  # fmt: skip
        future = FutureReservation(
            name=body["name"], zone=zone, project=project, number=engine.number(), body=body,
            reservation=reservation, created_at=now,
        )  # fmt: skip
        self.future[zone, future.name] = future
        self._add(reservation)
        return future.number

    def get_future(self, project: str, zone: str, name: str) -> FutureReservation:
        found = self.future.get((zone, name))
        if found is None:
            target = f"projects/{project}/zones/{zone}/futureReservations/{name}"
            raise call_error("not-found", target=target)
        return found

    def future_to_api(self, future: FutureReservation) -> dict[str, Any]:
        now = self._engine.clock.now()
        reservation, scope = future.reservation, f"zones/{future.zone}"
        assert reservation.ends_at is not None
        made = (reservation.zone, reservation.name) in self.known or now >= reservation.ends_at
        begun = "PROVISIONING" if now >= reservation.starts_at else "COMMITTED"
        status: dict[str, Any] = {
            "procurementStatus": "FULFILLED" if made else begun,
            "fulfilledCount": str(reservation.vms if made else 0),
            "lockTime": timestamp(future.created_at),
            "autoCreatedReservations": [
                link(future.project, f"{scope}/reservations/{reservation.name}")
            ]
            if made
            else [],
        }
        return {
            "kind": "compute#futureReservation", **future.body, "id": str(future.number),
            "zone": link(future.project, scope),
            "selfLink": link(future.project, f"{scope}/futureReservations/{future.name}"),
            "creationTimestamp": timestamp(future.created_at),
            "planningStatus": "SUBMITTED", "autoDeleteAutoCreatedReservations": True,
            "autoCreatedReservationsDeleteTime": timestamp(reservation.ends_at),
            "status": status,
        }  # fmt: skip

    def refuse_change(self, future: FutureReservation) -> None:
        raise invalid(
            f"The future reservation {future.name} in calendar mode cannot be changed, cancelled "
            "or deleted once it is submitted."
        )

    def _check_machine(self, machine: str, zone: str, field: str) -> None:
        known = catalog.machines().get(machine)
        if known is None or zone not in known.zones:
            raise invalid_field(f"{field}.machineType", machine)


def _time(window: dict[str, Any], name: str) -> datetime:
    if not window.get(name):
        raise required(f"resource.timeWindow.{name}")
    return datetime.fromisoformat(window[name])
