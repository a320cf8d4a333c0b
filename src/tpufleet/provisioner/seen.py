"""What the provisioner sees of the world, as data: pools, their owners, and pods that wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from tpufleet.provisioner import families, keys
from tpufleet.provisioner.families import Owner
from tpufleet.provisioner.pools import Capacity, Place, Wanted

__all__ = [
    "Asking", "Demand", "Owner", "PodRef", "Pool", "PoolStatus", "Trouble", "Use", "World",
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


class Trouble(StrEnum):
    """Why GKE could not do it, as far as that decides what follows."""

    STOCK = "out of stock"
    QUOTA = "quota used up"
    PERMISSION = "permission missing"
    REQUEST = "never acceptable"
    PASSING = "passing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """A node pool as GKE lists it."""

    name: str
    status: PoolStatus
    labels: Mapping[str, str] = field(default_factory=dict)
    words: str = ""  # GKE's own reason
    trouble: Trouble | None = None  # what its last failed operation or its conditions say
    zone: str = ""
    capacity: Capacity = Capacity.ON_DEMAND
    machine_type: str = ""
    nodes: int = 0
    chips: int = 0

    @property
    def ours(self) -> bool:
        return self.labels.get(keys.MANAGER) == keys.MANAGED_BY_US

    @property
    def place(self) -> Place:
        return Place(self.zone, self.capacity)

    @property
    def owner(self) -> tuple[str, str] | None:
        """Namespace and name of the JobSet, or what else, that it was made for."""
        return families.owned(self.labels)

    @property
    def parent(self) -> tuple[str, str] | None:
        """Namespace and name of the Job that it serves."""
        name = self.labels.get(keys.PARENT_NAME)
        return (self.labels.get(keys.PARENT_NAMESPACE, ""), name) if name else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PodRef:
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """A pod that waits for a pool, or the reason why no pool can help it."""

    pod: PodRef
    since: datetime
    wanted: Wanted | None = None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Asking:
    """A pool that is on its way."""

    namespace: str
    chips: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """A Job whose leader runs on a pool, be it its own or another's."""

    owner: tuple[str, str]  # namespace and name of the JobSet, or what else it belongs to
    parent: tuple[str, str]  # of the Job itself


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    pools: Sequence[Pool]
    owners: Mapping[tuple[str, str], Owner]  # by namespace and name
    demands: Sequence[Demand]
    youngest_node: Mapping[str, datetime] = field(default_factory=dict)  # by pool
    ready_nodes: Mapping[str, int] = field(default_factory=dict)
    # Owners that are gone, since when: a JobSet that vanished leaves no date behind.
    missing_since: Mapping[tuple[str, str], datetime] = field(default_factory=dict)
    lame_since: Mapping[str, datetime] = field(default_factory=dict)  # pools that do not serve
    # By pool: the scheduler may send a Job's pods to a pool that was made for another.
    used: Mapping[str, frozenset[Use]] = field(default_factory=dict)
    idle_since: Mapping[str, datetime] = field(default_factory=dict)  # their Jobs run elsewhere
    stopping: frozenset[str] = frozenset()  # pools whose deletion was asked for and not yet seen
    creating: Mapping[str, Asking] = field(default_factory=dict)  # asked for, not yet listed
