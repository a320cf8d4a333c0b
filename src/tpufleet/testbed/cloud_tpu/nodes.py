"""Nodes of the emulated cloud, as its own records, and as the API shows them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime

from google.cloud.tpu_v2.types import cloud_tpu

from tpufleet.errors import BadInput
from tpufleet.model import topology
from tpufleet.model.topology import Accelerator
from tpufleet.testbed.cloud_tpu.api_errors import ApiError, Code

State = cloud_tpu.Node.State
Health = cloud_tpu.Node.Health
LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
NODE_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
# Of all metadata values together, as Compute Engine has it.
METADATA_BYTES = 512 * 1024
# States in which a node holds no machine any more, only its name (and, to the user's cost, quota).
WITHOUT_MACHINE = (State.PREEMPTED, State.TERMINATED, State.STOPPED, State.HIDDEN)


@dataclass(slots=True)
class NodeRecord:
    name: str  # projects/…/locations/…/nodes/…
    zone: str
    capacity: str
    accelerator: Accelerator
    template: cloud_tpu.Node
    number: int
    created_at: datetime
    state: State = State.CREATING
    health: Health = Health.HEALTH_UNSPECIFIED
    health_description: str = ""
    dead_hosts: set[int] = field(default_factory=set)
    notice: str = ""  # preempted or maintenance, once hosts were told
    queued_resource: str = ""  # name of its queued resource
    generation: int = 0  # grows when a planned change must no longer happen

    @property
    def id(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def holds_stock(self) -> bool:
        return self.state not in WITHOUT_MACHINE

    def to_api(self) -> cloud_tpu.Node:
        node = cloud_tpu.Node()
        node._pb.CopyFrom(cloud_tpu.Node.pb(self.template))
        node.name, node.state, node.health = self.name, self.state, self.health
        node.id, node.create_time = self.number, self.created_at
        node.accelerator_type = self.accelerator.name
        node.health_description = self.health_description
        node.queued_resource = self.queued_resource
        node.symptoms = [
            cloud_tpu.Symptom(
                symptom_type=cloud_tpu.Symptom.SymptomType.EXECUTE_TIMED_OUT,
                worker_id=str(index),
                details=f"worker {index} does not answer",
            )
            for index in sorted(self.dead_hosts)
        ]
        if self.state is State.READY:
            node.network_endpoints = [
                cloud_tpu.NetworkEndpoint(ip_address=f"10.0.{self.number % 250}.{index + 2}")
                for index in range(min(self.accelerator.hosts, 250))
            ]
        return node


def capacity_of(node: cloud_tpu.Node) -> str:
    scheduling = node.scheduling_config
    if scheduling.spot or scheduling.preemptible:
        return "spot"
    return "reserved" if scheduling.reserved else "on-demand"


def validate(node_id: str, node: cloud_tpu.Node, zone: str) -> Accelerator:
    """What the API would refuse at the door."""
    if not NODE_ID.fullmatch(node_id):
        raise _bad(f"The node id {node_id!r} is not valid.")
    try:
        accelerator = topology.find(node.accelerator_type)
    except BadInput as error:
        raise _bad(
            f'The "{node.accelerator_type}" accelerator type was not found in zone {zone}.'
        ) from error
    if accelerator.name != node.accelerator_type:
        raise _bad(f'The "{node.accelerator_type}" accelerator type was not found in zone {zone}.')
    if not node.runtime_version:
        raise _bad("The runtime version was not found.")
    for key, value in node.labels.items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            raise _bad(f"The label {key}={value} is not valid.")
    if sum(len(value.encode()) for value in node.metadata.values()) > METADATA_BYTES:
        raise _bad("The metadata is too large.")
    return accelerator


def _bad(words: str) -> ApiError:
    return ApiError(Code.INVALID_ARGUMENT, f"Cloud TPU received an invalid argument. {words}")
