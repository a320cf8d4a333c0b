"""Adopting an instance that a person made, or a managed group of them, and giving it back: only
labels and metadata of the instances change
(cloud.google.com/compute/docs/reference/rest/v1/instances/setMetadata and setLabels).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import Any

from tpufleet.errors import ProviderBusy
from tpufleet.model.fleet.cloud_slices import CloudState
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import type_lookup
from tpufleet.providers.base import Order
from tpufleet.providers.compute import naming, requests, states
from tpufleet.providers.compute.api import PARALLEL_READS, ComputeApi
from tpufleet.providers.compute.naming import Location
from tpufleet.providers.compute.settings import ComputeSettings
from tpufleet.providers.compute.states import Observation
from tpufleet.providers.tpu_vm import adoption
from tpufleet.providers.tpu_vm import naming as metadata_keys
from tpufleet.providers.tpu_vm.adoption import Marks

Json = dict[str, Any]


def read(api: ComputeApi, location: Location, node: str) -> tuple[Json | None, list[Json]]:
    """The group of this name and its instances, or else the instance of this name."""
    path = location.group(node)
    group = api.get(path)
    names = [node] if group is None else [naming.short(vm["instance"]) for vm in api.managed(path)]
    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        found = pool.map(lambda name: api.get(location.instance(name)), names)
        return group, [each for each in found if each is not None]


def observe(
    group: Json | None, instances: list[Json], settings: ComputeSettings, now: datetime
) -> Observation:
    capacity = capacity_of(instances)
    if group is None and instances:
        return states.of_instance(instances[0], capacity)
    patience = settings.gang_patience
    return states.of_group(
        group or {}, instances, [], capacity=capacity, patience=patience, now=now
    )


def capacity_of(instances: list[Json]) -> Capacity:
    model = (instances[0].get("scheduling") or {}).get("provisioningModel") if instances else ""
    return next(
        (kind for kind, each in requests.MODELS.items() if each == model), Capacity.ON_DEMAND
    )


def check(
    api: ComputeApi, order: Order, settings: ComputeSettings, location: Location, now: datetime
) -> list[Json]:
    """The instances; BadRequest if they cannot become the slice of the order."""
    group, instances = read(api, location, order.node)
    if group is None and not instances:
        raise metadata_keys.no_such_node(order.node, order.zone, "cost project")
    for each in (states.config_of(group or {}), *instances):
        adoption.check_owner(each.get("labels") or {}, order)
    owner = naming.short(_marks(instances[0]).metadata.get("created-by", "")) if instances else ""
    if group is None and owner:
        repair = f"tpu adopt {owner} --pool {order.pool}"
        raise adoption.not_ready(order, f"a VM of group {owner}", repair)
    seen = observe(group, instances, settings, now)
    if seen.state in (CloudState.PENDING, CloudState.CREATING):
        raise adoption.not_ready(order, seen.state.value, "")
    machine = naming.short(instances[0]["machineType"]) if instances else "VMs"
    size = int((group or {}).get("targetSize", 1))
    topology = states.topology_of((group or {}).get("status", {})).get("acceleratorTopology")
    kind = next(
        (
            each
            for each in type_lookup.all_types().values()
            if (each.machine_type, each.hosts) == (machine, size)
            and (size == 1 or each.topology == topology)
        ),
        None,
    )
    if kind is None or kind.name != type_lookup.find(order.accelerator).name:
        name = type_lookup.short_name(kind.name) if kind else f"group of {size} {machine}"
        raise adoption.wrong_type(order, name)
    if seen.state is not CloudState.UP:
        stopped = [vm["name"] for vm in instances if vm["status"] != states.RUNNING]
        names = " ".join(stopped or [order.node])
        repair = f"gcloud compute instances start {names} --zone {order.zone}"
        raise adoption.not_ready(order, seen.state.value, repair)
    return instances


def adopt(
    api: ComputeApi, order: Order, settings: ComputeSettings, location: Location,
    instances: list[Json],
) -> None:  # fmt: skip
    """Labels last: what has them is listed, and its request is not repeated."""
    names = [vm["name"] for vm in instances if not adoption.adopted_as(vm.get("labels") or {})]
    change = lambda marks: adoption.adopted(marks, order, settings)
    _update(api, location, names, change, f"adopt {order.node}")


def give_back(api: ComputeApi, location: Location, node: str, slice_id: SliceId) -> None:
    """Also VMs that are no longer part of the group."""
    found = [*api.instances(location, slice_id, naming.SLICE), *read(api, location, node)[1]]
    names = {vm["name"] for vm in found}

    def change(marks: Marks) -> Marks:
        known = (marks.labels.get(metadata_keys.ADOPTED), marks.metadata.get(metadata_keys.ADOPTED))
        return adoption.given_back(marks) if slice_id in known else marks

    _update(api, location, sorted(names), change, f"release {node}")


def _update(
    api: ComputeApi, location: Location, names: Collection[str],
    change: Callable[[Marks], Marks], action: str,
) -> None:  # fmt: skip
    """ProviderBusy while it is in progress; then the request is repeated."""

    def update(name: str, verb: str) -> Json | None:
        path = location.instance(name)
        vm = api.get(path)
        if vm is None:
            return None
        before = _marks(vm)
        after, body = change(before), {}
        if verb == "setMetadata" and after.metadata != before.metadata:
            body = {**requests.items(after.metadata), "fingerprint": vm["metadata"]["fingerprint"]}
        elif verb == "setLabels" and after.labels != before.labels:
            body = {"labels": after.labels, "labelFingerprint": vm["labelFingerprint"]}
        return api.update(f"{path}/{verb}", body) if body else None

    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        for verb in ("setMetadata", "setLabels"):
            found = pool.map(partial(update, verb=verb), names)
            begun = [operation for operation in found if operation is not None]
            if not all(list(pool.map(lambda each: api.wait(each, location, action), begun))):
                raise ProviderBusy(f"{action}: in progress")


def _marks(instance: Json) -> Marks:
    items = (instance.get("metadata") or {}).get("items", ())
    return Marks(
        labels=instance.get("labels") or {},
        metadata={str(item["key"]): str(item.get("value", "")) for item in items},
    )
