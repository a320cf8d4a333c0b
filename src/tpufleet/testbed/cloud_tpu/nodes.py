"""Nodes of the emulated cloud: internal records and their API representation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

from google.cloud.tpu_v2.types import cloud_tpu

from tpufleet.errors import BadInput
from tpufleet.model import topology
from tpufleet.model.topology import Accelerator
from tpufleet.testbed.cloud_tpu.api_errors import ApiError, Code

State: Any = cloud_tpu.Node.State
Health: Any = cloud_tpu.Node.Health
# Members of proto-plus enums, which type checkers see as int.
NodeState: TypeAlias = Any
NodeHealth: TypeAlias = Any
LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
NODE_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
# Compute Engine's limit on all metadata values together.
METADATA_BYTES = 512 * 1024
# States in which a node has no hosts but is still listed, and counts against quota.
STATES_WITHOUT_HOSTS = (State.PREEMPTED, State.TERMINATED, State.STOPPED, State.HIDDEN)


@dataclass(slots=True)
class NodeRecord:
    name: str  # projects/…/locations/…/nodes/…
    zone: str
    capacity: str
    accelerator: Accelerator
    template: cloud_tpu.Node
    number: int
    created_at: datetime
    state: NodeState = State.CREATING
    health: NodeHealth = Health.HEALTH_UNSPECIFIED
    health_description: str = ""
    dead_hosts: set[int] = field(default_factory=set)
    notice: str = ""  # preempted or maintenance, once sent to the hosts
    queued_resource: str = ""  # full name
    generation: int = 0  # incremented to cancel scheduled events

    @property
    def id(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def holds_stock(self) -> bool:
        return self.state not in STATES_WITHOUT_HOSTS

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
                details=f"worker {index} does not respond",
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
    """Reject what the API rejects."""
    if not NODE_ID.fullmatch(node_id):
        raise _invalid(f"The node id {node_id!r} is not valid.")
    try:
        accelerator = topology.find(node.accelerator_type)
    except BadInput as error:
        raise _invalid(
            f'The "{node.accelerator_type}" accelerator type was not found in zone {zone}.'
        ) from error
    if accelerator.name != node.accelerator_type:
        raise _invalid(
            f'The "{node.accelerator_type}" accelerator type was not found in zone {zone}.'
        )
    if not node.runtime_version:
        raise _invalid("The runtime version was not found.")
    for key, value in node.labels.items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            raise _invalid(f"The label {key}={value} is not valid.")
    if sum(len(value.encode()) for value in node.metadata.values()) > METADATA_BYTES:
        raise _invalid("The metadata is too large.")
    return accelerator


def _invalid(detail: str) -> ApiError:
    return ApiError(Code.INVALID_ARGUMENT, f"Cloud TPU received an invalid argument. {detail}")
