"""What the provisioner sees of the world, as data: pools, their owners, and pods that wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from tpufleet.provisioner.gke_api.pool_specs import PoolCapacity, PoolLocation, PoolSpec
from tpufleet.provisioner.kube import label_keys, pod_owners
from tpufleet.provisioner.kube.pod_owners import OwnerStatus

__all__ = [
    "PendingPool", "PoolDemand", "OwnerStatus", "PodRef", "ObservedPool", "PoolStatus", "FailureCause", "PoolUser", "ClusterState",
]  # fmt: skip


class PoolStatus(StrEnum):
    """GKE's six, and one for what it may add."""

    PROVISIONING = "PROVISIONING"
    RUNNING = "RUNNING"
    RUNNING_WITH_ERROR = "RUNNING_WITH_ERROR"
    RECONCILING = "RECONCILING"
    STOPPING = "STOPPING"
    ERROR = "ERROR"
    UNKNOWN = "STATUS_UNSPECIFIED"


class FailureCause(StrEnum):
    """Why GKE could not do it, as far as that decides what follows."""

    OUT_OF_STOCK = "out of stock"
    QUOTA = "quota used up"
    PERMISSION = "permission missing"
    INVALID_REQUEST = "never acceptable"
    TRANSIENT = "passing"


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedPool:
    """A node pool as GKE lists it."""

    name: str
    status: PoolStatus
    labels: Mapping[str, str] = field(default_factory=dict)
    message: str = ""  # GKE's own reason
    failure_cause: FailureCause | None = (
        None  # what its last failed operation or its conditions say
    )
    zone: str = ""
    capacity: PoolCapacity = PoolCapacity.ON_DEMAND
    machine_type: str = ""
    nodes: int = 0
    chips: int = 0

    @property
    def managed(self) -> bool:
        return self.labels.get(label_keys.MANAGER) == label_keys.MANAGER_NAME

    @property
    def location(self) -> PoolLocation:
        return PoolLocation(self.zone, self.capacity)

    @property
    def owner(self) -> tuple[str, str] | None:
        """Namespace and name of the JobSet, or what else, that it was made for."""
        return pod_owners.owner_from_labels(self.labels)

    @property
    def parent(self) -> tuple[str, str] | None:
        """Namespace and name of the Job that it serves."""
        name = self.labels.get(label_keys.PARENT_NAME)
        return (self.labels.get(label_keys.PARENT_NAMESPACE, ""), name) if name else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PodRef:
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolDemand:
    """A pod that waits for a pool, or the reason why no pool can help it."""

    pod: PodRef
    since: datetime
    pool_spec: PoolSpec | None = None
    rejection: str = ""


@dataclass(frozen=True, slots=True)
class PendingPool:
    """A pool that is on its way."""

    namespace: str
    chips: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolUser:
    """A Job whose leader runs on a pool, be it its own or another's."""

    owner: tuple[str, str]  # namespace and name of the JobSet, or what else it belongs to
    parent: tuple[str, str]  # of the Job itself


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterState:
    pools: Sequence[ObservedPool]
    owners: Mapping[tuple[str, str], OwnerStatus]  # by namespace and name
    demands: Sequence[PoolDemand]
    youngest_node_at: Mapping[str, datetime] = field(default_factory=dict)  # by pool
    ready_nodes: Mapping[str, int] = field(default_factory=dict)
    # Owners that are gone, since when: a JobSet that vanished leaves no date behind.
    owner_missing_since: Mapping[tuple[str, str], datetime] = field(default_factory=dict)
    not_serving_since: Mapping[str, datetime] = field(
        default_factory=dict
    )  # pools that do not serve
    # By pool: the scheduler may send a Job's pods to a pool that was made for another.
    users: Mapping[str, frozenset[PoolUser]] = field(default_factory=dict)
    idle_since: Mapping[str, datetime] = field(default_factory=dict)  # their Jobs run elsewhere
    deleting: frozenset[str] = frozenset()  # pools whose deletion was asked for and not yet seen
    creating: Mapping[str, PendingPool] = field(default_factory=dict)  # asked for, not yet listed
