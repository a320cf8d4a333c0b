"""What planning sees: node pools, their owners, and pods that wait. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from tpufleet_gke.provisioner.model import label_keys, pod_owners
from tpufleet_gke.provisioner.model.pod_owners import OwnerStatus
from tpufleet_gke.provisioner.model.pool_specs import PoolCapacity, PoolLocation, PoolSpec
from tpufleet_gke.provisioner.settings import NodeNetwork


class PoolStatus(StrEnum):
    """GKE's six statuses; UNKNOWN stands for any that GKE adds."""

    PROVISIONING = "PROVISIONING"
    RUNNING = "RUNNING"
    RUNNING_WITH_ERROR = "RUNNING_WITH_ERROR"
    RECONCILING = "RECONCILING"
    STOPPING = "STOPPING"
    ERROR = "ERROR"
    UNKNOWN = "STATUS_UNSPECIFIED"


ERROR_STATUSES = (PoolStatus.ERROR, PoolStatus.RUNNING_WITH_ERROR)


class FailureCause(StrEnum):
    """Why GKE failed a request. The values are label values of a metric that alerts select on."""

    OUT_OF_STOCK = "stock"
    QUOTA = "quota"
    PERMISSION = "permission"
    INVALID_REQUEST = "request"
    TRANSIENT = "passing"
    POD_MISFIT = "misfit"  # the pool came up, and the pod that it was created for does not fit it


@dataclass(frozen=True, slots=True)
class PoolFailure:
    """Why GKE failed a request or a pool."""

    cause: FailureCause
    message: str
    detail: str = ""  # Google's whole text
    unknown: bool = False  # what that text means


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedPool:
    """A node pool as GKE lists it."""

    name: str
    status: PoolStatus
    labels: Mapping[str, str] = field(default_factory=dict)
    failure: PoolFailure | None = None  # from its status message and conditions
    zone: str = ""
    capacity: PoolCapacity = PoolCapacity.ON_DEMAND
    machine_type: str = ""
    topology: str = ""  # of a multi-host slice
    reservation: str = ""
    service_account: str = ""
    networks: tuple[NodeNetwork, ...] = ()  # additional ones
    nodes: int = 0
    chips: int = 0

    @property
    def managed(self) -> bool:
        """Created by the provisioner."""
        return self.labels.get(label_keys.MANAGER) == label_keys.MANAGER_NAME

    @property
    def location(self) -> PoolLocation:
        return PoolLocation(self.zone, self.capacity)

    @property
    def owner(self) -> tuple[str, str] | None:
        """Namespace and name of the JobSet, or other owner, that it was created for."""
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
    owner_name: str = ""  # see model.pod_owners
    owner_uid: str = ""
    job: str = ""  # or what else shares one slice


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolDemand:
    """A pod that waits for a pool, or the reason why no pool could serve it."""

    pod: PodRef
    since: datetime
    pool_spec: PoolSpec | None = None
    rejection: str = ""
    left_to_gke: str = ""  # why GKE itself creates the nodes; empty when it does not
    scheduler_message: str = ""  # why no node fits, in the scheduler's words


@dataclass(frozen=True, slots=True)
class PendingPool:
    """A pool that was requested and is not listed yet."""

    namespace: str
    chips: int
    machine_type: str = ""
    capacity: PoolCapacity = PoolCapacity.ON_DEMAND
    parent: str = ""  # name of the Job


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolUser:
    """A Job whose leader runs on a pool. The pool may have been created for another Job."""

    owner: tuple[str, str]  # namespace and name of the JobSet or other owner
    parent: tuple[str, str]  # of the Job itself


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterState:
    """Mappings are by pool name unless noted."""

    pools: Sequence[ObservedPool]
    owners: Mapping[tuple[str, str], OwnerStatus]  # by namespace and name
    demands: Sequence[PoolDemand]
    stranded: Sequence[PoolDemand] = ()  # pods beside the leader of their Job that wait for a node
    youngest_node_at: Mapping[str, datetime] = field(default_factory=dict)
    ready_nodes: Mapping[str, int] = field(default_factory=dict)
    # Chips that the device plugin has registered on ready nodes.
    ready_chips: Mapping[str, int] = field(default_factory=dict)
    # By owner: when it was first missing. A deleted JobSet leaves no timestamp.
    owner_missing_since: Mapping[tuple[str, str], datetime] = field(default_factory=dict)
    # Pools that are up while a pod still waits for them.
    not_serving_since: Mapping[str, datetime] = field(default_factory=dict)
    # Pools with all of their nodes and chips that no leader uses: from then on the scheduler could
    # place a pod there.
    free_since: Mapping[str, datetime] = field(default_factory=dict)
    # The scheduler may place a Job's pods on a pool that was created for another Job.
    users: Mapping[str, frozenset[PoolUser]] = field(default_factory=dict)
    # By namespace and name: Jobs whose leader is bound to a node of any kind, and completed ones.
    placed_jobs: frozenset[tuple[str, str]] = frozenset()
    completed_jobs: Mapping[tuple[str, str], datetime] = field(default_factory=dict)
    idle_since: Mapping[str, datetime] = field(default_factory=dict)  # their Jobs run elsewhere
    unused_since: Mapping[str, datetime] = field(default_factory=dict)  # no leader runs on them
    # Running pools that are being given to another Job, and that Job.
    adopting: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    unadoptable: frozenset[str] = frozenset()  # GKE refused to change their labels
    # Pools of which all nodes were cordoned by the provisioner, since the last one was.
    cordoned_since: Mapping[str, datetime] = field(default_factory=dict)
    cordoned: frozenset[str] = frozenset()  # with any node that the provisioner cordoned
    cordon_reasons: Mapping[str, str] = field(default_factory=dict)  # why they are to be deleted
    can_cordon: bool = True  # False without the permission to
    knows_auto_provisioning: bool = True  # False: GKE might create the nodes itself
    kept_until: Mapping[str, datetime] = field(default_factory=dict)  # a pod was found on them
    deleting: frozenset[str] = frozenset()  # deletion requested, not yet listed as STOPPING
    creating: Mapping[str, PendingPool] = field(default_factory=dict)  # requested, not yet listed

    def is_complete(self, pool: ObservedPool) -> bool:
        """All nodes are ready, and the device plugin has registered all chips."""
        return (
            self.ready_nodes.get(pool.name, 0) >= pool.nodes > 0
            and self.ready_chips.get(pool.name, 0) >= pool.chips
        )
