"""A second table about the Cloud TPU API: what its documentation says, sentence by sentence.
Written from the documentation, without the first table and without the emulator. Here: its pages,
and calls that several rows make."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from google.api_core import exceptions
from google.cloud import tpu_v2
from google.longrunning import operations_pb2

from tests.testbed.cloud_tpu.clients import PARENT, node
from tests.testbed.cloud_tpu.conformance_rows import (
    create,
    created,
    enqueue,
    name,
)  # fmt: skip
from tests.testbed.cloud_tpu.emulated_cloud import EmulatedCloud

NODES = "tpu/docs/reference/rest/v2/projects.locations.nodes"
QUEUES = "tpu/docs/reference/rest/v2/projects.locations.queuedResources"
TYPES = "tpu/docs/reference/rest/v2/projects.locations.acceleratorTypes"
RUNTIMES = "tpu/docs/runtimes"
OPERATIONS = "tpu/docs/reference/rest/v2/projects.locations.operations"
LOCATIONS = "tpu/docs/reference/rest/v2/projects.locations"
QUEUE_GUIDE = "tpu/docs/queued-resources"
SPOT_GUIDE = "tpu/docs/spot"
DISKS = "tpu/docs/setup-persistent-disk"
MANAGE = "tpu/docs/managing-tpus-tpu-vm"
SSH = "sdk/gcloud/reference/compute/tpus/tpu-vm/ssh"
V5E, V5P, V6E, V4 = "tpu/docs/v5e", "tpu/docs/v5p", "tpu/docs/v6e", "tpu/docs/v4"

Invalid, Precondition = exceptions.InvalidArgument, exceptions.FailedPrecondition
NotFound, Exists = exceptions.NotFound, exceptions.AlreadyExists
PermissionDenied = exceptions.PermissionDenied
LONG = 900.0
QUEUED = f"{PARENT}/queuedResources/q"
UUID = str(uuid.UUID(int=7))


@dataclass(frozen=True)
class Sentence:
    id: str
    source: str
    sentence: str  # of the page, shortened
    call: Callable[[EmulatedCloud], Any]
    refused: tuple[type[Exception], ...] = ()
    check: Callable[[Any], object] = field(default=lambda answer: True)


def hosts(world: EmulatedCloud, kind: str, runtime: str, zone: str) -> int:
    parent = f"projects/p/locations/{zone}"
    request = tpu_v2.Node(accelerator_type=kind, runtime_version=runtime)
    world.client.create_node(parent=parent, node_id="a", node=request, timeout=900)
    world.advance(LONG)
    return len(world.client.get_node(name=f"{parent}/nodes/a", timeout=900).network_endpoints)


def fetched(world: EmulatedCloud, node_id: str = "a") -> tpu_v2.Node:
    return world.client.get_node(name=name(node_id), timeout=900)


def queue(world: EmulatedCloud) -> tpu_v2.QueuedResource:
    return world.client.get_queued_resource(name=QUEUED, timeout=900)


def active(world: EmulatedCloud, request: tpu_v2.QueuedResource | None = None) -> Any:
    operation = enqueue(world, request)
    world.advance(LONG)
    return operation


def update(world: EmulatedCloud, mask: list[str], **fields: Any) -> tpu_v2.Node:
    created(world, tags=["old"], labels={"old": "1"})
    changed = tpu_v2.Node(name=name(), **fields)
    operation = world.client.update_node(node=changed, update_mask={"paths": mask}, timeout=900)
    world.advance(LONG)
    return operation.result(timeout=900)


def operation_of(world: EmulatedCloud, operation: Any) -> operations_pb2.Operation:
    return world.client.get_operation({"name": operation.operation.name}, timeout=900)


def stopped(world: EmulatedCloud) -> None:
    created(world, node=node(spot=False))
    world.client.stop_node({"name": name()}, timeout=900)
    world.advance(LONG)


def attributes(world: EmulatedCloud, kind: str = "v5litepod-16", **request: Any) -> Any:
    created(world, accelerator=kind)
    world.write_guest_attribute("a", "hostkeys/ssh-ed25519", "KEY")
    call = {"name": name(), **request}
    return world.client.get_guest_attributes(request=call, timeout=900).guest_attributes


def spec_of(**fields: Any) -> tpu_v2.QueuedResource:
    spec = tpu_v2.QueuedResource.Tpu.NodeSpec(node=node("v5litepod-16", spot=False), **fields)
    return tpu_v2.QueuedResource(tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]))


def cancelled(world: EmulatedCloud) -> operations_pb2.Operation:
    operation = create(world)
    world.client.cancel_operation({"name": operation.operation.name}, timeout=900)
    world.advance(LONG)
    return operation_of(world, operation)


def preempted(world: EmulatedCloud) -> None:
    created(world)
    world.preempt("a")
    world.advance(5)


def same(world: EmulatedCloud, request: tpu_v2.QueuedResource, attempts: int = 2) -> list[str]:
    for _ in range(attempts):
        enqueue(world, request, request_id=UUID)
    found = world.client.list_queued_resources(parent=PARENT, timeout=900)
    return [item.name for item in found]


def config(kind: str, topology: str) -> tpu_v2.AcceleratorConfig:
    return tpu_v2.AcceleratorConfig(type_=tpu_v2.AcceleratorConfig.Type[kind], topology=topology)


def with_config(kind: str, topology: str, **more: Any) -> tpu_v2.Node:
    runtime = {"V6E": "v2-alpha-tpuv6e", "V5P": "v2-alpha-tpuv5"}.get(kind, "v2-alpha-tpuv5-lite")
    return tpu_v2.Node(accelerator_config=config(kind, topology), runtime_version=runtime, **more)
