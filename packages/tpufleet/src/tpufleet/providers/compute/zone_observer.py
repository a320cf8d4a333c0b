"""Observes one zone: its groups, instances and pending creations, as slices."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from tpufleet.errors import ProviderError
from tpufleet.model.fleet.cloud_slices import CloudSlice, CloudState, ExpectedSlice
from tpufleet.model.fleet.pools import RefusalKind
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu.type_lookup import find, is_known
from tpufleet.providers.base import no_capacity_within
from tpufleet.providers.compute import adoption, error_mapping, naming, states
from tpufleet.providers.compute.api import ComputeApi
from tpufleet.providers.compute.naming import Location
from tpufleet.providers.compute.quota import QuotaReader, exceeded
from tpufleet.providers.compute.settings import ComputeSettings
from tpufleet.providers.compute.states import Observation, config_of
from tpufleet.providers.tpu_vm import naming as metadata_keys
from tpufleet.providers.tpu_vm.adoption import adopted_as
from tpufleet.providers.tpu_vm.bootstrap_reports import BootstrapReports
from tpufleet.providers.tpu_vm.pending_creations import Creation, PendingCreations

log = logging.getLogger(__name__)

# Of one observation; the rest follows in the next.
MAX_OPERATIONS = MAX_ERROR_READS = 50
SETTLES_WITHIN = timedelta(seconds=30)
# What still exists then is deleted again: the operation may have failed.
DELETED_WITHIN = timedelta(minutes=5)
PARALLEL_READS = 16
# Google may allow it meanwhile, and only in bulk mode is a slice granted as a whole.
BULK_REFUSAL_KEPT = timedelta(days=1)

Json = dict[str, Any]


class ZoneSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A slice, with the path of the group or instance behind it."""

    cloud_slice: CloudSlice
    path: str = ""  # empty: it is being created
    node: str = ""  # the adopted group or instance: never deleted
    order: str = ""  # label of the order; slices of one are a gang
    granted_at: datetime | None = None  # when its first VM was created: it costs money


class ZoneView(msgspec.Struct, frozen=True, kw_only=True):
    observed_at: datetime
    slices: Mapping[SliceId, ZoneSlice] = {}
    templates: frozenset[str] = frozenset()  # names of those that groups use
    policies: frozenset[str] = frozenset()


class ZoneObserver:
    def __init__(
        self,
        location: Location,
        api: ComputeApi,
        settings: ComputeSettings,
        pending: PendingCreations,
        fleet: str,
        quota: QuotaReader,
    ) -> None:
        self.location = location
        self.view: ZoneView | None = None
        self.released: dict[SliceId, datetime] = {}  # when a delete was accepted
        # Until when groups are created without bulk mode, and why.
        self.without_bulk: dict[Capacity, tuple[datetime, str]] = {}
        self._api = api
        self._settings = settings
        self._pending = pending
        self._fleet = metadata_keys.label_value(fleet)
        self._quota = quota
        self._bootstrap = BootstrapReports(api)

    def observe(self, now: datetime, expected: Collection[ExpectedSlice] = ()) -> ZoneView:
        """Listings are eventually consistent: an expected slice is only missing if neither a group
        nor an instance of its name is found."""
        listed = {each["name"]: each for each in self._api.groups(self.location)}
        groups = {name: each for name, each in listed.items() if self._is_own(config_of(each))}
        instances = self._api.instances(self.location, self._fleet)
        members: dict[str, list[Json]] = defaultdict(list)
        for instance in instances:
            members[instance.get("labels", {}).get(naming.SLICE, instance["name"])].append(instance)
        self._add_unlisted(groups, members, expected)
        adopted = {
            name: each
            for name, each in members.items()
            if metadata_keys.ADOPTED in (each[0].get("labels") or {})
        }
        taken = {*groups, *adopted}
        alone = {name: each[0] for name, each in members.items() if name not in taken}
        single = {name: vm for name, vm in alone.items() if vm["name"] == name}
        self._bootstrap.start_observation({self._paths(each) for each in members.values()}, now)
        observed: dict[SliceId, ZoneSlice] = {}
        for zone_slice in [
            *self._of_groups(groups, members, now),
            *(self._of_instance(vm, now) for vm in single.values()),
            *(self._of_adopted(name, each, listed, now) for name, each in adopted.items()),
        ]:
            observed[zone_slice.cloud_slice.id] = zone_slice
        for index, creation in enumerate(self._missing(observed)):
            created = self._of_creation(creation, now, read=index < MAX_OPERATIONS)
            if created is not None:
                observed[created.cloud_slice.id] = created
        self.released = {
            slice_id: at
            for slice_id, at in self.released.items()
            if slice_id in observed and now - at < DELETED_WITHIN
        }
        self.view = ZoneView(
            observed_at=now,
            slices=refuse_gangs(observed, self._settings.gang_patience, now),
            templates=frozenset(naming.short(each["instanceTemplate"]) for each in groups.values()),
            policies=frozenset(naming.short(_policy(each)) for each in groups.values()),
        )
        return self.view

    def _is_own(self, config: Mapping[str, Any]) -> bool:
        return (config.get("labels") or {}).get(naming.FLEET) == self._fleet

    def _add_unlisted(
        self,
        groups: dict[str, Json],
        members: dict[str, list[Json]],
        expected: Collection[ExpectedSlice],
    ) -> None:
        """Own groups and instances that exist although the listings lack them."""
        alone = {vm["name"] for each in members.values() for vm in each}
        lacking = [
            each
            for each in expected
            if each.zone == self.location.zone
            and each.id not in (members if each.node else {*groups, *alone})
            and not self._has_operation(each.id)  # which tells more
        ]
        for each in lacking:
            if each.node:
                _, instances = adoption.read(self._api, self.location, each.node)
                own = [vm for vm in instances if adopted_as(vm.get("labels") or {}) == each.id]
                members.update({each.id: own} if own else {})
        names = [each.id for each in lacking if not each.node]
        if not names:
            return
        paths = [(self.location.group(name), self.location.instance(name)) for name in names]
        with ThreadPoolExecutor(min(len(names), PARALLEL_READS)) as pool:
            found = list(pool.map(lambda pair: [self._api.get(path) for path in pair], paths))
        for name, (group, instance) in zip(names, found, strict=True):
            if group is not None and self._is_own(config_of(group)):
                groups[name] = group
            elif instance is not None and self._is_own(instance):
                members[name] = [instance]

    def _has_operation(self, slice_id: SliceId) -> bool:
        creation = self._pending.get(slice_id)
        return creation is not None and bool(creation.operation)

    def _of_groups(
        self, groups: Mapping[str, Json], members: Mapping[str, list[Json]], now: datetime
    ) -> list[ZoneSlice]:
        slices, reads = [], 0
        for name, group in groups.items():
            instances = members.get(name, [])
            errors: list[Json] = []
            if states.needs_errors(group, instances) and reads < MAX_ERROR_READS:
                reads += 1
                path = self.location.group(name)
                errors = self._api.managed_errors(path) or self._api.past_errors(path)[:1]
            slices.append(self._of_group(group, instances, errors, now))
        return slices

    def _of_group(
        self, group: Json, instances: Sequence[Json], errors: Sequence[Json], now: datetime
    ) -> ZoneSlice:
        config = config_of(group)
        capacity = Capacity(config["labels"].get(naming.CAPACITY, Capacity.SPOT))
        queued = capacity is Capacity.QUEUED
        seen = states.of_group(
            group,
            instances,
            errors,
            capacity=capacity,
            patience=self._settings.valid_for if queued else self._settings.gang_patience,
            now=now,
        )
        if queued and seen.state is CloudState.PENDING:
            seen = self._with_quota(seen, group, capacity, now)
        path = self.location.group(group["name"])
        if states.is_bulk(group):
            seen = self._without_bulk(seen, seen.message, capacity, now)
        return self._slice(group["name"], seen, path, config["labels"], instances, now)

    def stop_bulk(self, capacity: Capacity, why: str, now: datetime) -> None:
        self.without_bulk[capacity] = (now + BULK_REFUSAL_KEPT, why)

    def _without_bulk(
        self, seen: Observation, why: str, capacity: Capacity | None, now: datetime
    ) -> Observation:
        """The group was accepted, and bulk mode is refused for it later: the next has none."""
        refused = seen.state is CloudState.REFUSED and seen.refusal is RefusalKind.REQUEST
        if capacity is None or not refused or not error_mapping.refuses_bulk(why):
            return seen
        self.stop_bulk(capacity, why, now)
        return replace(seen, refusal=RefusalKind.CAPACITY)

    def _of_instance(self, instance: Json, now: datetime) -> ZoneSlice:
        labels = instance.get("labels", {})
        capacity = Capacity(labels.get(naming.CAPACITY, Capacity.SPOT))
        seen = states.of_instance(instance, capacity)
        path = self.location.instance(instance["name"])
        return self._slice(instance["name"], seen, path, labels, [instance], now)

    def _of_adopted(
        self, name: str, instances: list[Json], groups: Mapping[str, Json], now: datetime
    ) -> ZoneSlice:
        """An instance or a group that a person made, and that is never deleted."""
        node = instances[0]["labels"].get(metadata_keys.NODE, "")
        group = groups.get(node)
        if group is None and node != instances[0]["name"]:
            group = self._api.get(self.location.group(node))
        seen = adoption.observe(group, instances, self._settings, now)
        found = self._slice(name, seen, "", {}, instances, now, adopted=True)
        cloud = replace(found.cloud_slice, capacity=adoption.capacity_of(instances))
        return replace(found, cloud_slice=cloud, node=node)

    def _slice(
        self, name: str, seen: Observation, path: str, labels: Mapping[str, str],
        instances: Sequence[Json], now: datetime, adopted: bool = False,
    ) -> ZoneSlice:  # fmt: skip
        slice_id = SliceId(name)
        if slice_id in self.released:
            fenced = seen.fenced
            seen = Observation(state=CloudState.STOPPING, message="deleting", fenced=fenced)
        if seen.state is not CloudState.PENDING:
            self._pending.remove(slice_id)
        earlier = self.view.slices.get(slice_id) if self.view is not None else None
        if seen.state is CloudState.PREEMPTED and earlier is not None:
            # Of maintenance, which is not shown once the VMs have stopped.
            seen = replace(seen, notice=earlier.cloud_slice.notice or seen.notice)
        cloud = self._cloud_slice(slice_id, seen)
        if seen.state is CloudState.UP and instances:
            paths, only = self._paths(instances), slice_id if adopted else None
            reports = self._bootstrap.of_node(paths, len(instances), now, only)
            cloud = replace(cloud, bootstrap=reports)
        granted = [
            states.moment(vm.get("creationTimestamp"), now)
            for vm in instances
            if vm.get("status") not in states.WAITING
        ]
        return ZoneSlice(
            cloud_slice=cloud,
            path=path,
            order=labels.get(naming.ORDER, ""),
            granted_at=min(granted, default=None),
        )

    def _paths(self, instances: Sequence[Json]) -> str:
        """As `guest_attributes` takes them."""
        return ",".join(sorted(self.location.instance(vm["name"]) for vm in instances))

    def _cloud_slice(self, slice_id: SliceId, seen: Observation) -> CloudSlice:
        return CloudSlice(
            id=slice_id,
            zone=self.location.zone,
            state=seen.state,
            message=seen.message,
            refusal=seen.refusal,
            fenced=seen.fenced,
            notice=seen.notice,
            maintenance_at=seen.maintenance_at,
            ends_at=seen.ends_at,
        )

    def _with_quota(
        self, seen: Observation, group: Json, capacity: Capacity, now: datetime
    ) -> Observation:
        """Flex-start never says that it waits for quota."""
        name = _metadata(group).get(metadata_keys.ACCELERATOR, "")
        accelerator = find(name) if is_known(name) else None
        if accelerator is None:
            return seen
        # Without what is in use, which changes: a place in the queue is not given up for that.
        quota = self._quota.get(accelerator, self.location.zone, capacity, now, in_use=False)
        if quota is None or quota.allows(accelerator.chips):
            return seen
        message = exceeded(quota, accelerator, 1, self.location.zone)
        return Observation(
            state=CloudState.REFUSED, message=message, refusal=RefusalKind.QUOTA, fenced=True
        )

    def _missing(self, observed: Mapping[SliceId, ZoneSlice]) -> list[Creation]:
        pending = self._pending.in_zone(self.location.zone)
        return [each for each in pending if each.operation and each.slice_id not in observed]

    def _of_creation(self, creation: Creation, now: datetime, read: bool) -> ZoneSlice | None:
        """Requested and not listed: its operation tells why, if it is read."""
        seen = Observation(state=CloudState.CREATING, message="requested")
        path = f"{self.location.zone_path}/operations/{creation.operation}"
        operation = self._api.get(path) if read else None
        action = f"create {creation.slice_id} in {self.location.zone}"
        error: ProviderError | None = None
        if operation is not None:
            error = self._api.operation_error(operation, action)
        if error is not None:
            why = str(error).partition(": ")[2]
            seen = self._without_bulk(states.of_error(error), why, creation.capacity, now)
        elif read and (operation is None or operation.get("status") == "DONE"):
            name = creation.slice_id  # not listed yet
            if (group := self._api.get(self.location.group(name))) is not None:
                return self._of_group(group, [], [], now)
            if (instance := self._api.get(self.location.instance(name))) is not None:
                return self._of_instance(instance, now)
            if now - creation.asked_at > SETTLES_WITHIN:
                self._pending.remove(creation.slice_id)
                return None  # it existed and was deleted
        return ZoneSlice(
            cloud_slice=self._cloud_slice(creation.slice_id, seen), order=creation.order
        )


def refuse_gangs(
    observed: Mapping[SliceId, ZoneSlice], patience: timedelta, now: datetime
) -> dict[SliceId, ZoneSlice]:
    """Slices that were requested together are refused together: each is a group of its own, and
    those that were granted would wait, and cost, without the others. One that waits in a queue is
    refused once they have done so for too long."""
    granted: dict[str, datetime] = {}
    for each in observed.values():
        if each.order and each.granted_at is not None:
            first = granted.get(each.order, now)
            granted[each.order] = min(first, each.granted_at)
    refused: dict[str, CloudSlice] = {}
    for each in observed.values():
        cloud, waited = each.cloud_slice, now - granted.get(each.order, now)
        if cloud.state is CloudState.PENDING and waited >= patience:
            message = f"{no_capacity_within(waited)} of the first slice of its gang"
            cloud = replace(cloud, state=CloudState.REFUSED, message=message)
        if each.order and cloud.state is CloudState.REFUSED:
            refused[each.order] = cloud
    result = dict(observed)
    for slice_id, each in observed.items():
        cause = refused.get(each.order)
        if cause is None or not each.cloud_slice.healthy:
            continue
        cloud = replace(
            each.cloud_slice,
            state=CloudState.REFUSED,
            message=cause.message,
            refusal=cause.refusal,
        )
        result[slice_id] = replace(each, cloud_slice=cloud)
    return result


def _metadata(group: Json) -> Mapping[str, str]:
    return config_of(group).get("metadata") or {}


def _policy(group: Json) -> str:
    return str((group.get("resourcePolicies") or {}).get("workloadPolicy", ""))
