"""Nodes of the emulated cloud: internal records and their API representation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeAlias

from google.cloud.tpu_v2.types import cloud_tpu
from google.cloud.tpu_v2alpha1.types import cloud_tpu as alpha

from tpufleet.model.tpu.type_lookup import Accelerator
from tpufleet_testbed.cloud_tpu import catalog, node_validation
from tpufleet_testbed.cloud_tpu.api_errors import PROJECT_NUMBER, invalid_argument

State: Any = cloud_tpu.Node.State
Health: Any = cloud_tpu.Node.Health
ApiVersion: Any = cloud_tpu.Node.ApiVersion
# Members of proto-plus enums, which type checkers see as int.
NodeState: TypeAlias = Any
NodeHealth: TypeAlias = Any
MAINTENANCE_WINDOW = timedelta(hours=4)
SERVICE_ACCOUNT = f"{PROJECT_NUMBER}-compute@developer.gserviceaccount.com"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
# Of UpdateNode's reference; data_disks is what `gcloud compute tpus tpu-vm attach-disk` sends.
UPDATABLE = ("description", "tags", "labels", "metadata", "data_disks")
# What a client sets is ignored.
OUTPUT_ONLY = (
    "name", "state", "health_description", "create_time", "network_endpoints", "health", "id",
    "api_version", "symptoms", "queued_resource", "multislice_node",
)  # fmt: skip
# States in which a node has no hosts but is still listed, and counts against quota.
STATES_WITHOUT_HOSTS = (State.PREEMPTED, State.TERMINATED, State.STOPPED, State.HIDDEN)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaintenanceWindow:
    """Maintenance that the cloud has announced."""

    start: datetime
    scheduled: bool = True  # False: an urgent one
    ongoing: bool = False

    def to_api(self, by_hand: bool) -> alpha.UpcomingMaintenance:
        kinds = alpha.UpcomingMaintenance.MaintenanceType
        statuses = alpha.UpcomingMaintenance.MaintenanceStatus
        end = f"{self.start + MAINTENANCE_WINDOW:%Y-%m-%dT%H:%M:%SZ}"
        return alpha.UpcomingMaintenance(
            type_=kinds.SCHEDULED if self.scheduled else kinds.UNSCHEDULED,
            can_reschedule=by_hand and not self.ongoing,
            window_start_time=f"{self.start:%Y-%m-%dT%H:%M:%SZ}",
            window_end_time=end,
            latest_window_start_time=end,
            maintenance_status=statuses.ONGOING if self.ongoing else statuses.PENDING,
        )


@dataclass(slots=True, eq=False)
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
    dead_hosts: dict[int, datetime] = field(default_factory=dict)  # since when
    notice: str = ""  # preempted or maintenance, once sent to the hosts
    queued_resource: str = ""  # full name
    slice_index: int = 0  # in a multislice request
    num_slices: int = 1
    maintenance: MaintenanceWindow | None = None
    creation: str = ""  # the operation that creates it
    generation: int = 0  # incremented to cancel scheduled events

    @property
    def id(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def holds_stock(self) -> bool:
        return self.state not in STATES_WITHOUT_HOSTS

    @property
    def can_start_maintenance(self) -> bool:
        """By hand: cloud.google.com/tpu/docs/manually-start-maintenance"""
        return self.accelerator.generation == "v6e" and self.accelerator.chips >= 8

    def to_api(self) -> cloud_tpu.Node:
        node = cloud_tpu.Node()
        node._pb.CopyFrom(cloud_tpu.Node.pb(self.template))
        for name in OUTPUT_ONLY:
            node._pb.ClearField(name)
        node.name, node.state, node.health = self.name, self.state, self.health
        node.id, node.create_time = self.number, self.created_at
        node.api_version = ApiVersion.V2
        node.health_description = self.health_description
        node.queued_resource = self.queued_resource
        node.multislice_node = self.num_slices > 1
        self._fill_defaults(node)
        node.symptoms = [
            cloud_tpu.Symptom(
                symptom_type=cloud_tpu.Symptom.SymptomType.EXECUTE_TIMED_OUT,
                create_time=since,
                worker_id=str(index),
                details=unresponsive(index),
            )
            for index, since in sorted(self.dead_hosts.items())
        ]
        if self.state is State.READY:
            node.network_endpoints = [
                self._endpoint(index, node.network_config.enable_external_ips)
                for index in range(self.accelerator.hosts)
            ]
        return node

    def to_alpha(self) -> alpha.Node:
        """In v2alpha1: the messages of both versions share their field numbers, except where alpha
        has more."""
        node = alpha.Node.deserialize(cloud_tpu.Node.serialize(self.to_api()))
        if self.maintenance is not None:
            node.upcoming_maintenance = self.maintenance.to_api(self.can_start_maintenance)
        return node

    def _fill_defaults(self, node: cloud_tpu.Node) -> None:
        """Fields that the API fills in."""
        project = self.name.split("/")[1]
        region = self.zone.rpartition("-")[0]
        kind = catalog.CONFIG_TYPES[self.accelerator.generation]
        node.accelerator_type = self.accelerator.name
        node.accelerator_config = cloud_tpu.AcceleratorConfig(
            type_=catalog.ConfigType[kind], topology=self.accelerator.topology
        )
        network = node.network_config
        network.network = network.network or f"projects/{project}/global/networks/default"
        network.subnetwork = (
            network.subnetwork or f"projects/{project}/regions/{region}/subnetworks/default"
        )
        account = node.service_account
        account.email = account.email or SERVICE_ACCOUNT
        account.scope = list(account.scope) or [SCOPE]
        for disk in node.data_disks:
            if node_validation.is_writable(disk):
                disk.mode = node_validation.READ_WRITE

    def _endpoint(self, index: int, external: bool) -> cloud_tpu.NetworkEndpoint:
        """Addresses that are unique in the emulated cloud, and not reachable."""
        block, host = divmod(index + 2, 250)
        subnet = f"{self.number % 250}.{host}"
        endpoint = cloud_tpu.NetworkEndpoint(ip_address=f"10.{block}.{subnet}", port=8470)
        if external:
            endpoint.access_config = cloud_tpu.AccessConfig(
                external_ip=f"198.{18 + block}.{subnet}"
            )
        return endpoint


def unresponsive(host: int) -> str:
    return f"worker {host} does not respond"


def updated(
    template: cloud_tpu.Node, request: cloud_tpu.Node, paths: Sequence[str]
) -> cloud_tpu.Node:
    """The template with the fields that an update mask names."""
    result = cloud_tpu.Node()
    result._pb.CopyFrom(cloud_tpu.Node.pb(template))
    for path in paths:
        if path == "network_config.enable_external_ips":
            external = request.network_config.enable_external_ips
            result.network_config.enable_external_ips = external
        elif path in UPDATABLE:
            setattr(result, path, getattr(request, path))
        else:
            raise invalid_argument(f"The field {path} cannot be updated.")
    return result


def capacity_of(node: cloud_tpu.Node) -> str:
    scheduling = node.scheduling_config
    if scheduling.spot or scheduling.preemptible:
        return "spot"
    return "reserved" if scheduling.reserved else "on-demand"
