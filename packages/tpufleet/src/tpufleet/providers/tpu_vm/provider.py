"""The provider `tpu-vm`. It never waits for the cloud: operations are started and recorded, and the
next listing checks them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path

from google.cloud import tpu_v2

from tpufleet.clocks import Clock, SystemClock
from tpufleet.errors import BadRequest
from tpufleet.model.fleet.cloud_slices import CloudState, ExpectedSlice, SliceListing
from tpufleet.model.fleet.slices import SliceId, settings_digest
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.job.pod_settings import PodSettings
from tpufleet.model.tpu import type_lookup
from tpufleet.providers.base import Fault, Order, no_such_slice, out_of_capacity
from tpufleet.providers.tpu_vm import (
    adoption,
    alpha_queue,
    api,
    error_mapping,
    fault_injection,
    maintenance,
    naming,
    requests,
    states,
)
from tpufleet.providers.tpu_vm.api import TpuApi
from tpufleet.providers.tpu_vm.pending_creations import Creation, PendingCreations
from tpufleet.providers.tpu_vm.rate_limit import ZoneRateLimit
from tpufleet.providers.tpu_vm.reservations import ReservationReader
from tpufleet.providers.tpu_vm.settings import TpuVmSettings
from tpufleet.providers.tpu_vm.zone_listings import MIN_WAIT, ZoneListings
from tpufleet.providers.tpu_vm.zone_observer import ZoneObserver, ZoneSlice, ZoneView

# A release may use a view of the zone that is no older than this.
MAX_VIEW_AGE = timedelta(seconds=15)
UPDATED_FIELDS = ("labels", "metadata")  # by an adoption


class TpuVmProvider:
    name = "tpu-vm"
    exposes_tokens = True  # every process on a host can read its metadata

    def __init__(
        self,
        settings: TpuVmSettings,
        *,
        fleet: str,
        folder: Path | None = None,
        clock: Clock | None = None,
        deadline: float = api.DEADLINE,
        min_wait: float = MIN_WAIT,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.zones: Sequence[str] = settings.zones
        self._settings = settings
        self._fleet = fleet
        self._clock = clock or SystemClock()
        self._api = TpuApi(lambda: api.connect(settings.endpoint), deadline, settings.project)
        self._rest = cache(lambda: api.connect_rest(settings.endpoint, settings.project))
        self._reservations = ReservationReader(self._rest, settings.project, settings.reservation)
        self._pending = PendingCreations(folder)
        self._zones = {
            zone: ZoneObserver(
                zone,
                self._api,
                settings,
                self._pending,
                fleet,
                lambda: maintenance.connect(settings.endpoint),
                self._reservations,
            )
            for zone in settings.zones
        }
        self._rate_limits = {zone: ZoneRateLimit(zone, monotonic) for zone in settings.zones}
        self._listings: ZoneListings[ZoneView] = ZoneListings(settings.zones, min_wait)
        self._released: set[SliceId] = set()
        self._given_back: set[SliceId] = set()  # adopted nodes that keep our labels
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None

    def slice_settings(self, accelerator: str, pod: PodSettings) -> str:
        """The runtime version, not all settings of the server: an upgrade must not give up idle
        capacity, which may be scarce."""
        kind = type_lookup.find(accelerator)
        return settings_digest(self._settings.runtimes.get(kind.generation, kind.runtime))

    def request(self, order: Order) -> None:
        requests.validate(order, self._settings)
        location = self._zones[order.zone].location
        with self._rate_limits[order.zone].track_create():
            if order.node:
                self._adopt(order, location)
            elif requests.uses_queued_resource(order, self._settings):
                self._request_queued(order, location)
            else:
                self._request_node(order, location)

    def release(self, slice_id: SliceId, zone: str) -> None:
        if zone not in self._zones or not naming.NODE_ID.fullmatch(slice_id):
            return  # cannot exist
        with self._rate_limits[zone].track_call():
            zone_slice = self._find(slice_id, zone)
            if zone_slice is not None and zone_slice.adopted:
                self._give_back(slice_id, zone_slice)
            elif zone_slice is None or zone_slice.queued is None:
                self._delete_node(slice_id, zone, zone_slice)
            else:
                self._leave_gang(slice_id, zone_slice)
        self._pending.remove(slice_id)

    def listing(self, expected: Collection[ExpectedSlice] = ()) -> SliceListing:
        now = self._clock.now()
        views, errors = self._listings.all(lambda zone: self._zones[zone].observe(now, expected))
        slices = [
            zone_slice.cloud_slice for view in views.values() for zone_slice in view.slices.values()
        ]
        listed = {cloud.id for cloud in slices}
        with self._lock:
            self._released &= listed
            # One that works again can be updated: it is listed, and released once more.
            working = {cloud.id for cloud in slices if cloud.state is CloudState.UP}
            self._given_back &= listed - working
            slices = [cloud for cloud in slices if cloud.id not in self._given_back]
        return SliceListing(slices, errors)

    def inject(self, slice_id: SliceId, fault: Fault, host_index: int | None = None) -> None:
        if not self._settings.emulated:
            raise BadRequest(
                "TPU VMs do not support fault injection; use an emulator (tpu_vm.endpoint)"
            )
        zone_slice = self._search(slice_id)
        fault_injection.inject(
            self._settings.endpoint, naming.short_name(zone_slice), fault, host_index
        )
        self._wake()

    def on_change(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def close(self) -> None:
        self._wake = lambda: None
        self._listings.close()

    # Adopting.
    def _adopt(self, order: Order, location: naming.TpuLocation) -> None:
        node = states.check_adoptable(self._api.get_node(location.node(order.node)), order)
        if adoption.adopted_as(node.labels) is None:
            marks = adoption.adopted(_marks(node), order, self._settings)
            operation = self._api.update_node(_update(node, marks), *UPDATED_FIELDS)
            self._pending.add(
                Creation(
                    slice_id=order.slices[0],
                    zone=location.zone,
                    operation=operation.name,
                    asked_at=self._clock.now(),
                    node=order.node,
                )
            )

    def _give_back(self, slice_id: SliceId, zone_slice: ZoneSlice) -> None:
        """The node stays. Its agent exits when the server answers that the slice is released."""
        node = self._api.get_node(zone_slice.node or "")
        if node is None or adoption.adopted_as(node.labels) != slice_id:
            return
        if node.state not in states.UPDATABLE_STATES:
            with self._lock:
                self._given_back.add(slice_id)
            return
        marks = adoption.given_back(_marks(node))
        self._api.update_node(_update(node, marks), *UPDATED_FIELDS)

    # Requesting.
    def _request_node(self, order: Order, location: naming.TpuLocation) -> None:
        slice_id = order.slices[0]
        operation = self._api.create_node(
            location.path, slice_id, requests.build_node(order, self._settings)
        )
        if operation is None:
            self._check_owner(slice_id, location)
            return
        error_mapping.raise_error(operation, f"create {slice_id}")
        self._pending.add(
            Creation(
                slice_id=slice_id,
                zone=location.zone,
                operation=operation.name,
                asked_at=self._clock.now(),
            )
        )

    def _check_owner(self, slice_id: SliceId, location: naming.TpuLocation) -> None:
        """A node of this name exists: fine if this fleet requested it."""
        node = self._api.get_node(location.node(slice_id))
        if node is not None and node.labels.get(naming.FLEET) != naming.label_value(self._fleet):
            raise naming.of_another_fleet(slice_id, location.zone)

    def _request_queued(self, order: Order, location: naming.TpuLocation) -> None:
        queued_id = naming.queued_id(order)
        queued = requests.build_queued_resource(order, self._settings, location)
        if model := self._provisioning_model(order):
            flex = self._settings.max_run_duration if model == alpha_queue.FLEX_START else None
            body = alpha_queue.body(queued, model, flex)
            alpha_queue.create(self._rest(), location.path, queued_id, body)
            return
        operation = self._api.create_queued_resource(location.path, queued_id, queued)
        error_mapping.raise_error(operation, f"create queued resource {queued_id}")
        if operation is not None and not requests.queue_timeout(order.capacity, self._settings):
            self._refuse_if_waiting(order, location.queued(queued_id))

    def _provisioning_model(self, order: Order) -> str:
        """Empty: what v2 of the API has."""
        if requests.is_flex_start(order.capacity, self._settings):
            return alpha_queue.FLEX_START
        reserved = order.capacity is Capacity.RESERVED and self._settings.reservation
        if reserved and self._reservations.usable(order, self._clock.now()).binds:
            return alpha_queue.RESERVATION_BOUND
        return ""

    def _refuse_if_waiting(self, order: Order, name: str) -> None:
        for queued in self._api.list_queued_resources(name.partition("/queuedResources/")[0]):
            if queued.name == name and queued.state.state in states.WAITING:
                self._api.delete_queued_resource(name)
                detail = f"{len(order.slices)} slices requested together"
                raise out_of_capacity(order.accelerator, order.capacity, order.zone, detail)

    # Releasing.
    def _find(self, slice_id: SliceId, zone: str) -> ZoneSlice | None:
        """Its current state. A view without it is refreshed: it may be older than the request."""
        known = self._zones[zone]
        view, now = known.view, self._clock.now()
        if view is None or now - view.observed_at > MAX_VIEW_AGE or slice_id not in view.slices:
            view = known.observe(now, [ExpectedSlice(id=slice_id, zone=zone)])
        return view.slices.get(slice_id)

    def _delete_node(self, slice_id: SliceId, zone: str, zone_slice: ZoneSlice | None) -> None:
        if zone_slice is not None and zone_slice.cloud_slice.state is CloudState.STOPPING:
            return
        location = self._zones[zone].location
        if zone_slice is None and self._pending.get(slice_id) is None:
            return  # neither a node, listed or not, nor a pending creation
        self._api.delete_node(
            zone_slice.node if zone_slice and zone_slice.node else location.node(slice_id)
        )

    def _leave_gang(self, slice_id: SliceId, zone_slice: ZoneSlice) -> None:
        """Delete the node; with the last slice of the gang, delete the queued resource."""
        view = self._zones[zone_slice.cloud_slice.zone].view
        known = view.slices if view is not None else {}
        with self._lock:
            self._released.add(slice_id)
            left = [
                item for item in zone_slice.gang if item in known and item not in self._released
            ]
        if zone_slice.cloud_slice.state is CloudState.STOPPING and not zone_slice.node:
            return
        if not left:
            self._api.delete_queued_resource(zone_slice.queued or "")
        elif zone_slice.node and zone_slice.cloud_slice.state is not CloudState.STOPPING:
            self._api.delete_node(zone_slice.node)

    def _search(self, slice_id: SliceId) -> str:
        for zone in self._zones.values():
            zone_slice = zone.observe(self._clock.now()).slices.get(slice_id)
            if zone_slice is not None and zone_slice.node:
                return zone_slice.node
        raise no_such_slice(slice_id)


def _marks(node: tpu_v2.Node) -> adoption.Marks:
    return adoption.Marks(labels=dict(node.labels), metadata=dict(node.metadata))


def _update(node: tpu_v2.Node, marks: adoption.Marks) -> tpu_v2.Node:
    return tpu_v2.Node(name=node.name, labels=marks.labels, metadata=marks.metadata)
