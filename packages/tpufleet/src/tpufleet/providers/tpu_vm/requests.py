"""The Cloud TPU API request for an order: one node, or one queued resource."""

from __future__ import annotations

from datetime import timedelta

from google.cloud import tpu_v2

from tpufleet.errors import BadInput, BadRequest, not_available
from tpufleet.model.fleet.fleets import check_name, check_zone
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import type_lookup
from tpufleet.providers.base import Order, require_zone
from tpufleet.providers.tpu_vm import naming, startup_script
from tpufleet.providers.tpu_vm.settings import CLOUD_PLATFORM, DataDisk, TpuVmSettings


def validate(order: Order, settings: TpuVmSettings) -> type_lookup.Accelerator:
    """BadRequest before any call is sent."""
    try:
        for slice_id in order.slices:
            check_name(slice_id)
        check_zone(order.zone)
        accelerator = type_lookup.find(order.accelerator)
    except BadInput as error:
        raise BadRequest(str(error)) from error
    require_zone(order.zone, settings.zones, "tpu_vm.zones")
    runtime_version(accelerator, settings)
    return accelerator


def runtime_version(accelerator: type_lookup.Accelerator, settings: TpuVmSettings) -> str:
    runtime = settings.runtimes.get(accelerator.generation, accelerator.runtime)
    if runtime is None:
        name = type_lookup.short_name(accelerator.name)
        raise BadRequest(not_available(name, "as a TPU VM", "compute or gke"))
    return runtime


def uses_queued_resource(order: Order, settings: TpuVmSettings) -> bool:
    """Gangs do: only a queued resource is granted as a whole."""
    reserved = order.capacity is Capacity.RESERVED and bool(settings.reservation)
    queued = order.capacity in settings.queue or is_flex_start(order.capacity, settings)
    return len(order.slices) > 1 or queued or reserved


def is_flex_start(capacity: Capacity, settings: TpuVmSettings) -> bool:
    return capacity is Capacity.QUEUED and settings.max_run_duration is not None


def build_node(order: Order, settings: TpuVmSettings) -> tpu_v2.Node:
    request = _template(order, settings)
    request.scheduling_config = tpu_v2.SchedulingConfig(
        spot=order.capacity is Capacity.SPOT, reserved=order.capacity is Capacity.RESERVED
    )
    return request


def build_queued_resource(
    order: Order, settings: TpuVmSettings, location: naming.TpuLocation
) -> tpu_v2.QueuedResource:
    kind = tpu_v2.QueuedResource.Tpu.NodeSpec
    spec = kind(parent=location.path, node=_template(order, settings))
    if len(order.slices) == 1:
        spec.node_id = order.slices[0]
    else:
        spec.multislice_params = kind.MultisliceParams(
            node_count=len(order.slices), node_id_prefix=naming.gang_prefix(order)
        )
    request = tpu_v2.QueuedResource(tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]))
    if order.capacity is Capacity.SPOT:
        request.spot = tpu_v2.QueuedResource.Spot()
    elif order.capacity is Capacity.RESERVED:
        request.guaranteed = tpu_v2.QueuedResource.Guaranteed()
        request.reservation_name = _reservation_path(settings.reservation, location)
    request.queueing_policy = tpu_v2.QueuedResource.QueueingPolicy(
        valid_until_duration=queue_timeout(order.capacity, settings) + timedelta(minutes=1)
    )
    return request


def _reservation_path(reservation: str, location: naming.TpuLocation) -> str:
    """The API wants the full name; a short one is of the zone of the slices."""
    if not reservation or "/" in reservation:
        return reservation
    return f"{location.path}/reservations/{reservation}"


def queue_timeout(capacity: Capacity, settings: TpuVmSettings) -> timedelta:
    """How long a queued resource may wait before it counts as refused."""
    return settings.valid_for if capacity in settings.queue else settings.gang_patience


def _template(order: Order, settings: TpuVmSettings) -> tpu_v2.Node:
    accelerator = type_lookup.find(order.accelerator)
    runtime = runtime_version(accelerator, settings)
    request = base_node(accelerator, runtime, settings, order.zone)
    request.labels = naming.labels(order)
    request.metadata = {
        **settings.metadata,
        **naming.metadata(order),
        **startup_script.metadata(accelerator, settings),
    }
    return request


def base_node(
    accelerator: type_lookup.Accelerator, runtime: str, settings: TpuVmSettings, zone: str
) -> tpu_v2.Node:
    """The settings that all nodes of this installation share."""
    request = tpu_v2.Node(
        accelerator_type=accelerator.name,
        runtime_version=runtime,
        tags=list(settings.tags),
        network_config=tpu_v2.NetworkConfig(
            network=settings.network_path,
            subnetwork=settings.subnetwork_path(zone),
            enable_external_ips=settings.external_ips,
        ),
        data_disks=[attached_disk(disk) for disk in settings.data_disks],
    )
    if settings.service_account:
        request.service_account = tpu_v2.ServiceAccount(
            email=settings.service_account, scope=[CLOUD_PLATFORM]
        )
    return request


def attached_disk(disk: DataDisk) -> tpu_v2.AttachedDisk:
    mode = tpu_v2.AttachedDisk.DiskMode
    return tpu_v2.AttachedDisk(
        source_disk=disk.source, mode=mode.READ_ONLY if disk.read_only else mode.READ_WRITE
    )
