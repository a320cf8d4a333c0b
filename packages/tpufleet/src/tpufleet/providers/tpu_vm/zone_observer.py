"""Observes one zone: its nodes, queued resources and pending creations, as slices."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import msgspec
from google.cloud import tpu_v2

from tpufleet.errors import ProviderError
from tpufleet.model.fleet import fleets
from tpufleet.model.fleet.bootstrap import BootstrapReport
from tpufleet.model.fleet.cloud_slices import CloudSlice, CloudState, ExpectedSlice
from tpufleet.model.fleet.pools import RefusalKind, refusal_kind
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.providers.base import RESERVATION_ENDED, RUN_ENDED
from tpufleet.providers.tpu_vm import adoption, error_mapping, naming, requests, states
from tpufleet.providers.tpu_vm.api import TpuApi
from tpufleet.providers.tpu_vm.bootstrap_reports import BootstrapReports
from tpufleet.providers.tpu_vm.maintenance import MaintenanceWindows
from tpufleet.providers.tpu_vm.pending_creations import Creation, PendingCreations
from tpufleet.providers.tpu_vm.reservations import ReservationReader
from tpufleet.providers.tpu_vm.settings import TpuVmSettings

log = logging.getLogger(__name__)

# Operations are only read if their node is missing, and at most this many per observation.
MAX_OPERATIONS = 50
# A node that was just requested may be missing from a listing.
SETTLES_WITHIN = timedelta(seconds=30)
# Nodes that a listing lacks are read at the same time, so that many do not delay the others.
PARALLEL_READS = 16


class ZoneSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A slice, with the cloud resources behind it."""

    cloud_slice: CloudSlice
    node: str | None = None
    queued: str | None = None
    gang: tuple[SliceId, ...] = ()  # slices that share the queued resource
    adopted: bool = False  # a person made the node: it must not be deleted


class ZoneView(msgspec.Struct, frozen=True, kw_only=True):
    observed_at: datetime
    slices: Mapping[SliceId, ZoneSlice] = {}


class ZoneObserver:
    def __init__(
        self,
        zone: str,
        api: TpuApi,
        settings: TpuVmSettings,
        pending: PendingCreations,
        fleet: str,
        maintenance: Callable[[], Any] | None = None,
        reservations: ReservationReader | None = None,
    ) -> None:
        self.zone = zone
        self.location = naming.TpuLocation(project=settings.project, zone=zone)
        self._maintenance = (
            MaintenanceWindows(self.location.path, maintenance) if maintenance else None
        )
        self._api = api
        self._settings = settings
        self._reservations = reservations
        self._pending = pending
        self._fleet = naming.label_value(fleet)
        self.view: ZoneView | None = None
        self._bootstrap = BootstrapReports(api)
        self._gone: set[SliceId] = set()  # expected, and read as not found
        self._others: set[str] = set()  # fleets of other servers

    def observe(self, now: datetime, expected: Collection[ExpectedSlice] = ()) -> ZoneView:
        """Listings are eventually consistent: an expected slice is only missing if its node is not
        found by name either."""
        # Queued resources first: if one turns ACTIVE in between, its nodes are in the later list.
        queued = [
            item
            for item in self._api.list_queued_resources(self.location.path)
            if self._is_own_queued(item)
        ]
        listed = self._api.list_nodes(self.location.path)
        self._delete_expired(listed, now)
        self._report_others(listed)
        nodes = [node for node in listed if self._is_own(node)]
        nodes += self._unlisted(nodes, queued, expected)
        self._bootstrap.start_observation({node.name for node in nodes}, now)
        if nodes and self._maintenance is not None:
            self._maintenance.refresh(now)
        observed: dict[SliceId, ZoneSlice] = {}
        for node in nodes:
            zone_slice = self._of_node(node, now)
            observed[zone_slice.cloud_slice.id] = zone_slice
        for item in queued:
            for zone_slice in self._of_queued(item, observed, now):
                observed[zone_slice.cloud_slice.id] = zone_slice
        for index, creation in enumerate(self._missing(observed)):
            created = self._of_creation(creation, now, read=index < MAX_OPERATIONS)
            if created is not None:
                observed[created.cloud_slice.id] = created
        self.view = ZoneView(observed_at=now, slices=observed)
        return self.view

    def _unlisted(
        self,
        listed: Sequence[tpu_v2.Node],
        queued: Sequence[tpu_v2.QueuedResource],
        expected: Collection[ExpectedSlice],
    ) -> list[tpu_v2.Node]:
        """Own nodes that exist although the listing lacks them."""
        known = {self._slice_of(node) for node in listed}
        names: dict[SliceId, str] = {}  # of the nodes to read, by slice
        in_queue: set[SliceId] = set()
        for item in queued:
            nodes = _node_names(item)
            in_queue.update(nodes)
            if item.state.state is states.QueuedState.ACTIVE:
                names.update(nodes)
        here = [each for each in expected if each.zone == self.zone]
        self._gone &= {each.id for each in here}
        explained = known | in_queue | self._gone
        for each in here:
            # The operation of a creation tells more.
            if each.id not in explained and self._pending.get(each.id) is None:
                names[each.id] = each.node or each.id
        names = {slice_id: name for slice_id, name in names.items() if slice_id not in known}
        if not names:
            return []
        with ThreadPoolExecutor(min(len(names), PARALLEL_READS)) as pool:
            paths = [self.location.node(name) for name in names.values()]
            nodes_read = list(pool.map(self._api.get_node, paths))
        found = []
        for slice_id, node in zip(names, nodes_read, strict=True):
            if node is not None and self._is_own(node) and self._slice_of(node) == slice_id:
                found.append(node)
            elif slice_id not in in_queue:
                self._gone.add(slice_id)
        if found:
            log.warning("the listing of %s lacks %d TPU VMs that exist", self.zone, len(found))
        return found

    def _slice_of(self, node: tpu_v2.Node) -> SliceId:
        slices = naming.slices_of(node.metadata)
        node_id = naming.short_name(node.name)
        return adoption.adopted_as(node.labels) or naming.slice_of_node(node_id, slices)

    def _delete_expired(self, nodes: Sequence[tpu_v2.Node], now: datetime) -> None:
        """Manual nodes whose `--autostop` time is over."""
        for node in nodes:
            end = fleets.expires_at(node.labels)
            if end is not None and end <= now and node.state is not states.State.DELETING:
                log.info("deleting %s: its autostop time is over", node.name)
                self._api.delete_node(node.name)

    def _report_others(self, nodes: Sequence[tpu_v2.Node]) -> None:
        """When another fleet appears: a new server does not take over the slices of an old one."""
        counts = Counter(node.labels.get(naming.FLEET, self._fleet) for node in nodes)
        counts.pop(self._fleet, None)
        for fleet in counts.keys() - self._others:
            log.warning(
                "%s has %d TPU VMs of another server (fleet %s); `tpu cost project` shows whether "
                "it still exists", self.zone, counts[fleet], fleet,
            )  # fmt: skip
        self._others = set(counts)

    def _is_own(self, node: tpu_v2.Node) -> bool:
        return node.labels.get(naming.FLEET) == self._fleet

    def _is_own_queued(self, queued: tpu_v2.QueuedResource) -> bool:
        specs = queued.tpu.node_spec
        return bool(specs) and self._is_own(specs[0].node)

    def _of_node(self, node: tpu_v2.Node, now: datetime) -> ZoneSlice:
        slices = naming.slices_of(node.metadata)
        adopted_as = adoption.adopted_as(node.labels)
        slice_id = self._slice_of(node)
        state, message, lost, notice = states.node_state(node)
        if state is not CloudState.CREATING:
            self._pending.remove(slice_id)
        cloud = CloudSlice(
            id=slice_id,
            zone=self.zone,
            state=state,
            message=message,
            lost_hosts=lost,
            suspected=True,  # by a health check
            notice=notice,
            fenced=node.state in states.FENCED_STATES,
            maintenance_at=self._maintenance.start_of(node.name) if self._maintenance else None,
            ends_at=None if adopted_as else self._end_of(node.labels, node.create_time, now),
            capacity=states.capacity_of(node) if adopted_as else None,
            bootstrap=self._bootstrap_reports(node, state, now),
        )
        if adopted_as:
            return ZoneSlice(cloud_slice=cloud, node=node.name, adopted=True)
        return ZoneSlice(
            cloud_slice=cloud, node=node.name, queued=node.queued_resource or None, gang=slices
        )

    def _end_of(
        self, labels: Mapping[str, str], created_at: datetime | None, now: datetime
    ) -> datetime | None:
        """When Google deletes what was requested with these labels."""
        capacity, settings = Capacity(labels.get(naming.CAPACITY, Capacity.SPOT)), self._settings
        if capacity is Capacity.QUEUED and settings.max_run_duration and created_at:
            return created_at + settings.max_run_duration
        if capacity is not Capacity.RESERVED or not settings.reservation or not self._reservations:
            return None
        try:
            return self._reservations.known(self.zone, now).ends_at
        except ProviderError as error:
            log.warning("cannot read reservation %s: %s", settings.reservation, error)
            return None

    def _bootstrap_reports(
        self, node: tpu_v2.Node, state: CloudState, now: datetime
    ) -> tuple[BootstrapReport, ...]:
        if state is not CloudState.UP or naming.GUEST_ATTRIBUTES not in node.metadata:
            return ()
        hosts = node.metadata.get(naming.HOSTS, "1")
        count = int(hosts) if hosts.isdecimal() else 1
        return self._bootstrap.of_node(node.name, count, now, adoption.adopted_as(node.labels))

    def _of_queued(
        self,
        queued: tpu_v2.QueuedResource,
        observed: Mapping[SliceId, ZoneSlice],
        now: datetime,
    ) -> list[ZoneSlice]:
        """The slices of a queued resource whose nodes do not tell more."""
        template = queued.tpu.node_spec[0].node
        slices = naming.slices_of(template.metadata)
        queue_state = queued.state.state
        capacity = template.labels.get(naming.CAPACITY, Capacity.SPOT)
        timeout = requests.queue_timeout(Capacity(capacity), self._settings)
        state, message, kind = states.queued_state(queued, timeout, now)
        end = self._end_of(template.labels, queued.create_time, now)
        if state is CloudState.PREEMPTED and end is not None and now >= end:
            reserved = capacity == Capacity.RESERVED
            message = RESERVATION_ENDED if reserved else RUN_ENDED
        active = queue_state in (states.QueuedState.ACTIVE, states.QueuedState.PROVISIONING)
        has_nodes = any(slice_id in observed for slice_id in slices)
        slices_queued = []
        for slice_id in slices:
            node = observed.get(slice_id)
            if node is not None and active:
                continue  # already observed as a node
            if queue_state is states.QueuedState.ACTIVE and has_nodes:
                continue  # its node is gone; the queued resource goes with the others
            if queue_state is states.QueuedState.ACTIVE:
                state, message = CloudState.FAILED, "its TPU VMs were deleted"
            # A preempted node has no machines, while its siblings are still being deleted.
            fenced = node is not None and node.cloud_slice.fenced
            cloud = CloudSlice(
                id=slice_id,
                zone=self.zone,
                state=state,
                message=message,
                refusal=kind,
                fenced=fenced or queue_state is states.QueuedState.SUSPENDED,
            )
            slices_queued.append(
                ZoneSlice(
                    cloud_slice=cloud,
                    node=node.node if node is not None else None,
                    queued=queued.name,
                    gang=slices,
                )
            )
        return slices_queued

    def _missing(self, observed: Mapping[SliceId, ZoneSlice]) -> list[Creation]:
        pending = self._pending.in_zone(self.zone)
        return [creation for creation in pending if creation.slice_id not in observed]

    def _of_creation(self, creation: Creation, now: datetime, read: bool) -> ZoneSlice | None:
        """A requested node that is not listed as ours: its operation tells why, if it is read."""
        state, message, kind = CloudState.CREATING, "requested", None
        name = self.location.node(creation.node or creation.slice_id)
        operation = self._api.get_operation(creation.operation) if read else None
        if operation is not None and operation.HasField("error"):
            verb = "adopt" if creation.node else "create"
            action = f"{verb} {creation.node or creation.slice_id} in {self.zone}"
            error = error_mapping.translate_status(
                operation.error.code, operation.error.message, action
            )
            kind = refusal_kind(error)
            state, message = CloudState.REFUSED if kind else CloudState.FAILED, str(error)
        elif read and (operation is None or operation.done):
            node = self._api.get_node(name)
            if node is not None and self._is_own(node):
                return self._of_node(node, now)  # not listed yet
            if now - creation.asked_at > SETTLES_WITHIN:
                self._pending.remove(creation.slice_id)
                return None  # it existed and was deleted
        cloud = CloudSlice(
            id=creation.slice_id,
            zone=self.zone,
            state=state,
            message=message,
            refusal=kind or RefusalKind.CAPACITY,
        )
        if creation.node:
            return ZoneSlice(cloud_slice=cloud, node=name, adopted=True)
        return ZoneSlice(cloud_slice=cloud)


def _node_names(queued: tpu_v2.QueuedResource) -> dict[SliceId, str]:
    """Names of the nodes that a queued resource makes, by slice."""
    spec = queued.tpu.node_spec[0]
    slices = naming.slices_of(spec.node.metadata)
    if "multislice_params" not in spec:
        return {slice_id: spec.node_id for slice_id in slices[:1]}
    prefix = spec.multislice_params.node_id_prefix or naming.short_name(queued.name)
    return {slice_id: f"{prefix}-{index}" for index, slice_id in enumerate(slices)}
