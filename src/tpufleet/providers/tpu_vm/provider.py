"""The provider `tpu-vm`. Nothing here waits for the cloud: operations are started, written down,
and looked at again by the next listing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from datetime import timedelta
from pathlib import Path

from google.cloud import tpu_v2

from tpufleet.clocks import Clock, SystemClock
from tpufleet.errors import BadRequest, NoCapacity, ProviderError, ProviderUnavailable, RateLimited
from tpufleet.model.cloud_slices import CloudState, SliceListing
from tpufleet.model.slices import SliceId
from tpufleet.providers.base import Fault, Order
from tpufleet.providers.tpu_vm import api, error_mapping, fault_injection, naming, requests, states
from tpufleet.providers.tpu_vm.api import TpuApi
from tpufleet.providers.tpu_vm.pending_creations import Creation, PendingCreations
from tpufleet.providers.tpu_vm.rate_limit import ZoneRateLimit
from tpufleet.providers.tpu_vm.settings import TpuVmSettings
from tpufleet.providers.tpu_vm.zone_observer import ZoneObserver, ZoneSlice, ZoneView

# A release that finds a view no older than this need not look again.
MAX_VIEW_AGE = timedelta(seconds=15)
# How long a listing waits for its slowest zone: some multiple of what that zone usually takes.
MIN_WAIT, MAX_WAIT, WAIT_FACTOR = 1.0, 20.0, 4.0


class TpuVmProvider:
    name = "tpu-vm"
    exposes_tokens = True  # metadata of a machine is for all who run on it

    def __init__(
        self,
        settings: TpuVmSettings,
        *,
        fleet: str,
        folder: Path | None = None,
        clock: Clock | None = None,
        connect: Callable[[], tpu_v2.TpuClient] | None = None,
        deadline: float = api.DEADLINE,
        min_wait: float = MIN_WAIT,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.zones: Sequence[str] = settings.zones
        self._settings = settings
        self._fleet = fleet
        self._clock = clock or SystemClock()
        self._api = TpuApi(connect or (lambda: api.connect(settings.endpoint)), deadline)
        self._pending = PendingCreations(folder)
        self._zones = {
            zone: ZoneObserver(zone, self._api, settings, self._pending, fleet)
            for zone in settings.zones
        }
        self._paces = {zone: ZoneRateLimit(zone, monotonic) for zone in settings.zones}
        self._looks = _ZoneListings(settings.zones, min_wait)
        self._released: set[SliceId] = set()
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None

    def request(self, order: Order) -> None:
        requests.validate(order, self._settings)
        zone, pace = self._zones[order.zone], self._paces[order.zone]
        pace.acquire()
        try:
            with pace.track_call():
                if requests.uses_queued_resource(order, self._settings):
                    self._ask_queue(order, zone.location)
                else:
                    self._ask_node(order, zone.location)
        except RateLimited:
            pace.on_rate_limited()
            raise
        pace.on_success()

    def release(self, slice_id: SliceId, zone: str) -> None:
        if zone not in self._zones or not naming.NODE_ID.fullmatch(slice_id):
            return  # no such thing was ever asked for
        with self._paces[zone].track_call():
            found = self._find(slice_id, zone)
            if found is None or found.queued is None:
                self._delete_node(slice_id, zone, found)
            else:
                self._leave_gang(slice_id, found)
        self._pending.remove(slice_id)

    def listing(self) -> SliceListing:
        now = self._clock.now()
        views = self._looks.all(lambda zone: self._zones[zone].observe(now))
        seen = {zone: view for zone, view in views.items() if isinstance(view, ZoneView)}
        if not seen:
            raise next(
                (error for error in views.values() if isinstance(error, ProviderError)),
                ProviderUnavailable("no zone answers"),
            )
        slices = [found.cloud_slice for view in seen.values() for found in view.slices.values()]
        listed = {cloud.id for cloud in slices}
        with self._lock:
            self._released &= listed
        return SliceListing(slices, unseen=set(views) - set(seen))

    def inject(self, slice_id: SliceId, fault: Fault, host_index: int | None = None) -> None:
        if not self._settings.emulated:
            raise BadRequest("real TPU VMs cannot be hurt on command; use an emulator")
        found = self._search(slice_id)
        fault_injection.inject(self._settings.endpoint, naming.short_name(found), fault, host_index)
        self._wake()

    def on_change(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def close(self) -> None:
        self._wake = lambda: None
        self._looks.close()

    # Asking.
    def _ask_node(self, order: Order, place: naming.TpuLocation) -> None:
        slice_id = order.slices[0]
        made = self._api.create_node(
            place.path, slice_id, requests.build_node(order, self._settings)
        )
        if made is None:
            self._check_ours(slice_id, place)
            return
        if made.HasField("error"):
            error = made.error
            raise error_mapping.translate_status(error.code, error.message, f"create {slice_id}")
        self._pending.add(
            Creation(
                slice_id=slice_id,
                zone=place.zone,
                operation=made.name,
                asked_at=self._clock.now(),
            )
        )

    def _check_ours(self, slice_id: SliceId, place: naming.TpuLocation) -> None:
        """A node of this name exists: fine if we asked for it before."""
        node = self._api.get_node(place.node(slice_id))
        if node is not None and node.labels.get(naming.FLEET) != naming.label_value(self._fleet):
            raise BadRequest(f"{place.zone} has a node {slice_id} that is not of this fleet")

    def _ask_queue(self, order: Order, place: naming.TpuLocation) -> None:
        queued_id = naming.queued_id(order)
        queued = requests.build_queued_resource(order, self._settings, place)
        made = self._api.create_queued_resource(place.path, queued_id, queued)
        if made is not None and made.HasField("error"):
            error = made.error
            raise error_mapping.translate_status(error.code, error.message, f"ask for {queued_id}")
        if made is not None and not requests.queue_timeout(order.capacity, self._settings):
            self._give_up_if_it_waits(order, place.queued(queued_id))

    def _give_up_if_it_waits(self, order: Order, name: str) -> None:
        for queued in self._api.list_queued_resources(name.partition("/queuedResources/")[0]):
            if queued.name == name and queued.state.state in states.WAITING:
                self._api.delete_queued_resource(name)
                raise NoCapacity(
                    f"no capacity in {order.zone} for {len(order.slices)} × {order.accelerator} "
                    f"({order.capacity}) at once"
                )

    # Letting go.
    def _find(self, slice_id: SliceId, zone: str) -> ZoneSlice | None:
        """Where it stands. A view that lacks it is not believed: it may be older than the ask."""
        known = self._zones[zone]
        view, now = known.view, self._clock.now()
        if view is None or now - view.observed_at > MAX_VIEW_AGE or slice_id not in view.slices:
            view = known.observe(now)
        return view.slices.get(slice_id)

    def _delete_node(self, slice_id: SliceId, zone: str, found: ZoneSlice | None) -> None:
        if found is not None and found.cloud_slice.state is CloudState.STOPPING:
            return
        place = self._zones[zone].location
        if found is None and self._pending.get(slice_id) is None:
            return  # nothing of it is there, and nothing is on its way
        self._api.delete_node(found.node if found and found.node else place.node(slice_id))

    def _leave_gang(self, slice_id: SliceId, found: ZoneSlice) -> None:
        """The queued resource goes with the last of its slices; until then only the node."""
        view = self._zones[found.cloud_slice.zone].view
        known = view.slices if view is not None else {}
        with self._lock:
            self._released.add(slice_id)
            left = [item for item in found.gang if item in known and item not in self._released]
        if found.cloud_slice.state is CloudState.STOPPING and not found.node:
            return
        if not left:
            self._api.delete_queued_resource(found.queued or "")
        elif found.node and found.cloud_slice.state is not CloudState.STOPPING:
            self._api.delete_node(found.node)

    def _search(self, slice_id: SliceId) -> str:
        for zone in self._zones.values():
            found = zone.observe(self._clock.now()).slices.get(slice_id)
            if found is not None and found.node:
                return found.node
        raise BadRequest(f"there is no slice {slice_id} to hurt")


class _ZoneListings:
    """Looks at all zones side by side. A zone that does not answer is left out, and is not asked
    again until it has: it holds one thread, and nobody else's time."""

    def __init__(self, zones: Sequence[str], shortest: float) -> None:
        self._pool = ThreadPoolExecutor(max(len(zones), 1), thread_name_prefix="tpu-vm")
        self._zones = tuple(zones)
        self._shortest = shortest
        self._under_way: dict[str, Future[ZoneView | ProviderError]] = {}
        self._usual: dict[str, float] = {}

    def all(self, look: Callable[[str], ZoneView]) -> dict[str, ZoneView | ProviderError]:
        begun = time.monotonic()
        answers: dict[str, ZoneView | ProviderError] = {}
        mine: dict[str, Future[ZoneView | ProviderError]] = {}
        for zone in self._zones:
            earlier = self._under_way.get(zone)
            if earlier is not None and not earlier.done():
                answers[zone] = ProviderUnavailable(f"{zone} does not answer")
            else:
                mine[zone] = self._under_way[zone] = self._pool.submit(self._timed, look, zone)
        for zone, future in mine.items():
            left = begun + self._patience(zone) - time.monotonic()
            wait_for([future], timeout=max(0.0, left))
            unanswered = ProviderUnavailable(f"{zone} does not answer")
            answers[zone] = future.result() if future.done() else unanswered
        return answers

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _timed(self, look: Callable[[str], ZoneView], zone: str) -> ZoneView | ProviderError:
        begun = time.monotonic()
        try:
            view = look(zone)
        except ProviderError as error:
            return error
        self._usual[zone] = time.monotonic() - begun
        return view

    def _patience(self, zone: str) -> float:
        usual = self._usual.get(zone)
        if usual is None:
            return MAX_WAIT
        return min(max(self._shortest, WAIT_FACTOR * usual), MAX_WAIT)
