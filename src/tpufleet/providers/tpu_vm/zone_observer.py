"""One look at one zone: its nodes, its queued resources and the creations under way, as slices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from google.cloud import tpu_v2

from tpufleet.errors import NoCapacity, ProviderError, QuotaExceeded
from tpufleet.model.cloud_slices import CloudSlice, CloudState
from tpufleet.model.jobs import Capacity
from tpufleet.model.slices import SliceId
from tpufleet.providers.tpu_vm import error_mapping, naming, requests, states
from tpufleet.providers.tpu_vm.api import TpuApi
from tpufleet.providers.tpu_vm.pending_creations import Creation, PendingCreations
from tpufleet.providers.tpu_vm.settings import TpuVmSettings

# Operations are only asked about when their node is missing; never more than this in one look.
MAX_OPERATIONS = 50
# A node that was just asked for may be missing from a listing.
SETTLES_WITHIN = timedelta(seconds=30)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZoneSlice:
    """A slice, and what there is of it in the cloud."""

    cloud_slice: CloudSlice
    node: str | None = None
    queued: str | None = None
    gang: tuple[SliceId, ...] = ()  # that share the queued resource


@dataclass(frozen=True, kw_only=True, slots=True)
class ZoneView:
    observed_at: datetime
    slices: Mapping[SliceId, ZoneSlice] = field(default_factory=dict)


class ZoneObserver:
    def __init__(
        self, zone: str, api: TpuApi, settings: TpuVmSettings, pending: PendingCreations, fleet: str
    ) -> None:
        self.zone = zone
        self.location = naming.TpuLocation(project=settings.project, zone=zone)
        self._api = api
        self._settings = settings
        self._pending = pending
        self._fleet = naming.label_value(fleet)
        self._unwell_since: dict[str, datetime] = {}
        self.view: ZoneView | None = None

    def observe(self, now: datetime) -> ZoneView:
        # Requests first: one that turns ACTIVE in between has its nodes in the later answer.
        queued = [
            item
            for item in self._api.list_queued_resources(self.location.path)
            if self._ours_queued(item)
        ]
        nodes = [node for node in self._api.list_nodes(self.location.path) if self._ours(node)]
        self._remember_unwell(nodes, now)
        found: dict[SliceId, ZoneSlice] = {}
        for node in nodes:
            one = self._of_node(node, now)
            found[one.cloud_slice.id] = one
        for item in queued:
            for one in self._of_queued(item, found, now):
                found[one.cloud_slice.id] = one
        for creation in self._missing(found):
            one = self._of_creation(creation, now)
            if one is not None:
                found[one.cloud_slice.id] = one
        self.view = ZoneView(observed_at=now, slices=found)
        return self.view

    def _ours(self, node: tpu_v2.Node) -> bool:
        return node.labels.get(naming.FLEET) == self._fleet

    def _ours_queued(self, queued: tpu_v2.QueuedResource) -> bool:
        specs = queued.tpu.node_spec
        return bool(specs) and self._ours(specs[0].node)

    def _remember_unwell(self, nodes: list[tpu_v2.Node], now: datetime) -> None:
        unwell = {node.name for node in nodes if node.health in states.UNHEALTHY}
        self._unwell_since = {name: self._unwell_since.get(name, now) for name in unwell}

    def _of_node(self, node: tpu_v2.Node, now: datetime) -> ZoneSlice:
        slices = naming.slices_of(node.metadata)
        slice_id = naming.slice_of_node(naming.short_name(node.name), slices)
        since = self._unwell_since.get(node.name)
        state, words, lost, notice = states.node_state(node, since, now)
        if state is not CloudState.CREATING:
            self._pending.remove(slice_id)
        cloud = CloudSlice(
            id=slice_id, zone=self.zone, state=state, message=words, lost_hosts=lost, notice=notice
        )
        return ZoneSlice(
            cloud_slice=cloud, node=node.name, queued=node.queued_resource or None, gang=slices
        )

    def _of_queued(
        self, queued: tpu_v2.QueuedResource, found: Mapping[SliceId, ZoneSlice], now: datetime
    ) -> list[ZoneSlice]:
        """What a request says of its slices, unless their nodes say it better."""
        template = queued.tpu.node_spec[0].node
        slices = naming.slices_of(template.metadata)
        standing = queued.state.state
        capacity = template.labels.get(naming.CAPACITY, Capacity.SPOT)
        patience = requests.queue_timeout(Capacity(capacity), self._settings)
        state, words = states.queued_state(queued, patience, now)
        active = standing in (states.QueuedState.ACTIVE, states.QueuedState.PROVISIONING)
        has_nodes = any(slice_id in found for slice_id in slices)
        answers = []
        for slice_id in slices:
            node = found.get(slice_id)
            if node is not None and active:
                continue  # its queued resource only repeats it
            if standing is states.QueuedState.ACTIVE and has_nodes:
                continue  # of this slice nothing is left; the request goes with the others
            if standing is states.QueuedState.ACTIVE:
                state, words = CloudState.FAILED, "its nodes are gone"
            cloud = CloudSlice(id=slice_id, zone=self.zone, state=state, message=words)
            answers.append(
                ZoneSlice(
                    cloud_slice=cloud,
                    node=node.node if node is not None else None,
                    queued=queued.name,
                    gang=slices,
                )
            )
        return answers

    def _missing(self, found: Mapping[SliceId, ZoneSlice]) -> list[Creation]:
        under_way = self._pending.in_zone(self.zone)
        return [creation for creation in under_way if creation.slice_id not in found][
            :MAX_OPERATIONS
        ]

    def _of_creation(self, creation: Creation, now: datetime) -> ZoneSlice | None:
        """A node that was asked for and is not there: its operation knows why."""
        state, words = CloudState.CREATING, "asked for"
        operation = self._api.get_operation(creation.operation)
        if operation is not None and operation.HasField("error"):
            doing = f"create {creation.slice_id} in {self.zone}"
            error = error_mapping.translate_status(
                operation.error.code, operation.error.message, doing
            )
            state, words = refusal_state(error)
        elif (operation is None or operation.done) and now - creation.asked_at > SETTLES_WITHIN:
            self._pending.remove(creation.slice_id)
            return None  # it was there, and is gone
        cloud = CloudSlice(id=creation.slice_id, zone=self.zone, state=state, message=words)
        return ZoneSlice(cloud_slice=cloud)


def refusal_state(error: ProviderError) -> tuple[CloudState, str]:
    refused = isinstance(error, NoCapacity | QuotaExceeded)
    return CloudState.REFUSED if refused else CloudState.FAILED, str(error)
