"""A plan: node pools to create, delete and give away, and why pods wait. Data only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from tpufleet_gke.provisioner.model.cluster_state import (
    FailureCause,
    ObservedPool,
    PendingPool,
    PodRef,
)
from tpufleet_gke.provisioner.model.pool_specs import PoolLocation, PoolSpec
from tpufleet_gke.provisioner.planning.warm_pools import AdoptPool


@dataclass(frozen=True, kw_only=True, slots=True)
class CreatePool:
    spec: PoolSpec
    location: PoolLocation
    pool_name: str
    pod: PodRef

    @property
    def pending_pool(self) -> PendingPool:
        shape = self.spec.shape
        return PendingPool(
            self.spec.namespace, shape.chips, shape.machine_type, self.location.capacity,
            self.spec.parent.name,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletePool:
    pool: ObservedPool
    reason: str
    orphan: bool = False  # its owner does not exist
    misfit: PoolSpec | None = None  # the waiting pod does not fit the pool of this spec
    evict: bool = False  # even while pods run on it


@dataclass(frozen=True, kw_only=True, slots=True)
class CordonPool:
    """Let no new pods on the nodes of a pool that is about to be deleted."""

    pool: ObservedPool
    reason: str = ""  # of the deletion
    lift: bool = False  # let them in again: the pool is kept


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingPod:
    pod: PodRef
    reason: str
    report: bool = False  # worth an event: someone has to act, or there is no capacity
    cause: FailureCause | None = None  # None while a pool is on its way
    detail: str = ""  # Google's whole text, where it refused a pool
    left_to_gke: bool = False  # GKE itself creates the nodes
    until: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PodMisfit:
    """A pod that does not fit the pools of its kind; no more are created for it for now."""

    spec: PoolSpec
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    creates: tuple[CreatePool, ...] = ()
    deletes: tuple[DeletePool, ...] = ()
    cordons: tuple[CordonPool, ...] = ()
    adoptions: tuple[AdoptPool, ...] = ()
    waiting: tuple[WaitingPod, ...] = ()
    misfits: tuple[PodMisfit, ...] = ()
    recheck_at: datetime | None = None  # when time alone may change the plan

    def describe(self) -> Iterator[str]:
        """One line for each action, for a dry run."""
        for create in self.creates:
            shape, pod = create.spec.shape, create.pod
            yield (
                f"would create {create.pool_name}, {shape.nodes} × {shape.machine_type} in "
                f"{create.location}, for pod {pod.namespace}/{pod.name}"
            )
        for adopt in self.adoptions:
            pod = adopt.pod
            yield f"would give {adopt.pool.name} to pod {pod.namespace}/{pod.name}"
        for cordon in self.cordons:
            verb = "uncordon" if cordon.lift else "cordon"
            yield f"would {verb} the nodes of {cordon.pool.name}"
        for delete in self.deletes:
            yield f"would delete {delete.pool.name}: {delete.reason}"
        for waiting in self.waiting:
            yield f"pod {waiting.pod.namespace}/{waiting.pod.name} waits: {waiting.reason}"
