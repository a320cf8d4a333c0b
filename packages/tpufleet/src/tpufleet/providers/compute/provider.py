"""The provider `compute`. It never waits for capacity: operations are started and recorded, and the
next listing checks them."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tpufleet.clocks import Clock, SystemClock
from tpufleet.errors import BadRequest, ProviderBusy, ProviderError, QuotaExceeded
from tpufleet.model.fleet.cloud_slices import CloudState, ExpectedSlice, SliceListing
from tpufleet.model.fleet.slices import SliceId, settings_digest
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.job.pod_settings import PodSettings
from tpufleet.model.tpu import type_lookup
from tpufleet.model.tpu.type_lookup import Accelerator
from tpufleet.providers.base import Fault, Order, no_such_slice
from tpufleet.providers.compute import adoption, error_mapping, naming, requests
from tpufleet.providers.compute.api import ComputeApi
from tpufleet.providers.compute.error_mapping import MissingResource
from tpufleet.providers.compute.naming import Location
from tpufleet.providers.compute.quota import QuotaReader, exceeded
from tpufleet.providers.compute.settings import ComputeSettings
from tpufleet.providers.compute.shared_resources import SharedResources
from tpufleet.providers.compute.zone_observer import ZoneObserver, ZoneSlice, ZoneView
from tpufleet.providers.tpu_vm import naming as metadata_keys
from tpufleet.providers.tpu_vm.google_rest import GoogleRest
from tpufleet.providers.tpu_vm.pending_creations import Creation, PendingCreations
from tpufleet.providers.tpu_vm.rate_limit import ZoneRateLimit
from tpufleet.providers.tpu_vm.reservations import ReservationReader
from tpufleet.providers.tpu_vm.zone_listings import MIN_WAIT, ZoneListings

log = logging.getLogger(__name__)

# A release may use a view of the zone that is no older than this.
MAX_VIEW_AGE = timedelta(seconds=15)
# As the emulator calls them.
_FAULTS = {Fault.PREEMPT: "vanish", Fault.PREEMPT_NOTICE: "preempt"}


class ComputeProvider:
    name = "compute"
    exposes_tokens = True  # every process on a host can read its metadata

    def __init__(
        self,
        settings: ComputeSettings,
        *,
        fleet: str,
        folder: Path | None = None,
        clock: Clock | None = None,
        rest: GoogleRest | None = None,
        min_wait: float = MIN_WAIT,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.zones: Sequence[str] = settings.zones
        self._settings = settings
        self._fleet = fleet
        self._clock = clock or SystemClock()
        rest = rest or GoogleRest(settings.endpoint, settings.project)
        self._rest = rest
        self._api = ComputeApi(rest, settings.project)
        self._pending = PendingCreations(folder)
        self._shared = SharedResources(self._api, fleet)
        self._reservations = ReservationReader(lambda: rest, settings.project, settings.reservation)
        self._quota = quota = QuotaReader(rest, settings.project)
        self._zones = {
            zone: ZoneObserver(
                Location(project=settings.project, zone=zone),
                self._api,
                settings,
                self._pending,
                fleet,
                quota,
            )
            for zone in settings.zones
        }
        self._rate_limits = {zone: ZoneRateLimit(zone, monotonic) for zone in settings.zones}
        self._listings: ZoneListings[ZoneView] = ZoneListings(settings.zones, min_wait)
        self._wake: Callable[[], None] = lambda: None

    def slice_settings(self, accelerator: str, pod: PodSettings) -> str:
        """The image, not all settings of the server: an upgrade must not give up idle capacity."""
        return settings_digest(self._settings.image(type_lookup.find(accelerator).generation))

    def request(self, order: Order) -> None:
        accelerator = requests.validate(order, self._settings)
        location = self._zones[order.zone].location
        with self._rate_limits[order.zone].track_create():
            if order.node:
                self._adopt(order, location)
            else:
                self._create(order, accelerator, location)

    def release(self, slice_id: SliceId, zone: str) -> None:
        if zone not in self._zones or not metadata_keys.NODE_ID.fullmatch(slice_id):
            return  # cannot exist
        with self._rate_limits[zone].track_call():
            zone_slice, creation = self._find(slice_id, zone), self._pending.get(slice_id)
            node = (zone_slice.node if zone_slice else "") or (creation.node if creation else "")
            if node:
                self._give_back(node, slice_id, zone)
            elif zone_slice is not None:
                self._delete(zone_slice, self._zones[zone])
        self._pending.remove(slice_id)

    def listing(self, expected: Collection[ExpectedSlice] = ()) -> SliceListing:
        now = self._clock.now()
        views, errors = self._listings.all(lambda zone: self._zones[zone].observe(now, expected))
        self._collect(views, now)
        found = [each.cloud_slice for view in views.values() for each in view.slices.values()]
        return SliceListing(found, errors)

    def inject(self, slice_id: SliceId, fault: Fault, host_index: int | None = None) -> None:
        if not self._settings.emulated:
            raise BadRequest(
                "Compute Engine does not support fault injection; use an emulator "
                "(compute.endpoint)"
            )
        now = self._clock.now()
        views = [zone.observe(now) for zone in self._zones.values()]
        if not any(slice_id in view.slices for view in views):
            raise no_such_slice(slice_id)
        body = {"target": slice_id, "fault": _FAULTS.get(fault, fault.value), "host": host_index}
        answer = self._rest.post("compute", "compute/testbed/v1/injectFault", body)
        if answer.status >= 400:
            raise BadRequest(answer.message)
        self._wake()

    def on_change(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def close(self) -> None:
        self._wake = lambda: None
        self._listings.close()

    # Adopting.
    def _adopt(self, order: Order, location: Location) -> None:
        """Saved before the first call, so that a release finds what a crash left behind."""
        slice_id, now = order.slices[0], self._clock.now()
        try:
            found = adoption.check(self._api, order, self._settings, location, now)
            self._pending.add(
                Creation(
                    slice_id=slice_id, zone=order.zone, operation="", asked_at=now, node=order.node
                )
            )
            adoption.adopt(self._api, order, self._settings, location, found)
        except BadRequest:
            if self._pending.get(slice_id) is not None:
                self._give_back(order.node, slice_id, order.zone)
            self._pending.remove(slice_id)
            raise

    def _give_back(self, node: str, slice_id: SliceId, zone: str) -> None:
        """It stays. Its agents exit when the server answers that the slice is released."""
        adoption.give_back(self._api, self._zones[zone].location, node, slice_id)

    # Requesting.
    def _create(self, order: Order, accelerator: Accelerator, location: Location) -> None:
        if order.capacity is Capacity.QUEUED:
            self._check_quota(order, accelerator)
        grouped = requests.uses_group(accelerator, order.capacity)
        template = self._prepare(order, accelerator, location) if grouped else ""
        for slice_id in order.slices:
            if grouped:
                self._insert_group(order, slice_id, accelerator, template, location)
            else:
                body = requests.instance(order, slice_id, accelerator, self._settings, location)
                self._insert(order, location, "instances", body)

    def _check_quota(self, order: Order, accelerator: Accelerator) -> None:
        """Before the first slice is granted and paid for: the others would wait, and flex-start
        does not say that it waits for quota."""
        slices, zone, now = len(order.slices), order.zone, self._clock.now()
        if any(self._pending.get(slice_id) for slice_id in order.slices):
            return  # a repeated call; its first slices may be in use by now
        try:
            quota = self._quota.get(accelerator, zone, order.capacity, now)
        except ProviderError as error:
            log.warning("cannot read the quota: %s", error)
            return
        if quota is not None and not quota.allows(accelerator.chips, slices):
            raise QuotaExceeded(exceeded(quota, accelerator, slices, zone))

    def _prepare(self, order: Order, accelerator: Accelerator, location: Location) -> str:
        """What a group refers to must exist before it. Returns the name of the template."""
        now = self._clock.now()
        if accelerator.hosts > 1:
            policy = requests.policy(order.fleet, accelerator.topology)
            self._shared.ensure(location, location.policy(policy["name"]), policy, now)
        bound = True
        if order.capacity is Capacity.RESERVED:
            # One that cannot be read is taken for one that binds, as on Google's page of TPUs.
            bound = self._reservations.usable(order, now).binds is not False
        template = requests.template(order, accelerator, self._settings, bound=bound)
        self._shared.ensure(location, location.template(template["name"]), template, now)
        return str(template["name"])

    def _insert_group(
        self, order: Order, slice_id: SliceId, accelerator: Accelerator, template: str,
        location: Location,
    ) -> None:  # fmt: skip
        """In bulk mode, unless the zone refuses that for this kind of capacity: Google's documents
        disagree on whether spot and on-demand groups can have it."""
        zone, now = self._zones[order.zone], self._clock.now()
        until, refusal = zone.without_bulk.get(order.capacity, (now, ""))
        bulk = until <= now
        body = requests.group(order, slice_id, accelerator, template, location, bulk=bulk)
        try:
            self._insert(order, location, "instanceGroupManagers", body)
        except BadRequest as error:
            why = str(error).partition(": ")[2]  # without the name
            if bulk and error_mapping.refuses_bulk(why):
                log.warning("%s; creating groups there without it", error)
                zone.stop_bulk(order.capacity, why, now)
                self._insert_group(order, slice_id, accelerator, template, location)
            elif isinstance(error, MissingResource) and self._shared.lacks(error.names):
                raise ProviderBusy(str(error)) from error
            elif bulk:
                raise
            else:
                zone.without_bulk.pop(order.capacity, None)  # neither is accepted
                raise BadRequest(f"{refusal}; and without bulk mode: {why}") from error

    def _insert(
        self, order: Order, location: Location, collection: str, body: dict[str, Any]
    ) -> None:
        """Saved before the call: after a crash the same call is repeated, with one effect."""
        name = SliceId(body["name"])
        creation = self._pending.get(name)
        if creation is not None and creation.operation:
            return
        if creation is None:
            creation = Creation(
                slice_id=name,
                zone=location.zone,
                operation="",
                asked_at=self._clock.now(),
                order=metadata_keys.label_value(order.id),
                request_id=naming.new_request_id(),
                capacity=order.capacity,
            )
            self._pending.add(creation)
        path = f"{location.zone_path}/{collection}"
        try:
            operation = self._api.insert(path, body, creation.request_id)
        except BadRequest:
            self._pending.remove(name)
            raise
        if operation is None:
            self._pending.remove(name)
            self._check_owner(f"{path}/{name}")
            return
        self._pending.add(replace(creation, operation=str(operation["name"])))

    def _check_owner(self, path: str) -> None:
        """It exists: fine if this fleet requested it."""
        found = self._api.get(path) or {}
        config = (found.get("allInstancesConfig") or {}).get("properties") or found
        owner = (config.get("labels") or {}).get(naming.FLEET)
        if found and owner != metadata_keys.label_value(self._fleet):
            raise BadRequest(f"{naming.short(path)} exists, and belongs to another fleet")

    # Releasing.
    def _delete(self, zone_slice: ZoneSlice, observer: ZoneObserver) -> None:
        cloud, location = zone_slice.cloud_slice, observer.location
        if cloud.state is CloudState.STOPPING:
            return
        # One that is being created may be there although it is not listed.
        both = (location.group(cloud.id), location.instance(cloud.id))
        for path in (zone_slice.path,) if zone_slice.path else both:
            self._api.delete(path)
        observer.released[cloud.id] = self._clock.now()

    def _find(self, slice_id: SliceId, zone: str) -> ZoneSlice | None:
        """Its current state. A view without it is refreshed: it may be older than the request."""
        known = self._zones[zone]
        view, now = known.view, self._clock.now()
        if view is None or now - view.observed_at > MAX_VIEW_AGE or slice_id not in view.slices:
            view = known.observe(now, [ExpectedSlice(id=slice_id, zone=zone)])
        return view.slices.get(slice_id)

    def _collect(self, views: Mapping[str, ZoneView], now: datetime) -> None:
        """Templates and policies that no group uses. Only in regions whose zones all responded."""
        by_region: dict[str, list[str]] = defaultdict(list)
        for zone, observer in self._zones.items():
            by_region[observer.location.region].append(zone)
        for zones in by_region.values():
            if any(zone not in views for zone in zones):
                continue
            used = {
                "templates": {name for zone in zones for name in views[zone].templates},
                "policies": {name for zone in zones for name in views[zone].policies},
            }
            location = self._zones[zones[0]].location
            try:
                self._shared.collect(location, used, now)
            except ProviderError as error:
                log.warning("cannot delete unused templates and policies: %s", error)
