"""In which order gangs get node pools, and what is kept for those that have some. Pure.

A gang are the slices of a JobSet that run at the same time, or one slice of another owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from tpufleet_gke.provisioner.model.cluster_state import (
    ClusterState,
    ObservedPool,
    PendingPool,
    PoolDemand,
    PoolStatus,
)
from tpufleet_gke.provisioner.model.gangs import GangMember
from tpufleet_gke.provisioner.planning import pool_lifetime

Key = tuple[str, str, int]  # namespace and name of the owner, and the stage
_NEVER = datetime.fromisoformat("9000-01-01T00:00:00+00:00")


@dataclass(slots=True)
class Gang:
    key: Key
    demands: list[PoolDemand] = field(default_factory=list)  # the longest waiting first
    pools: list[ObservedPool] = field(default_factory=list)
    unseen: list[GangMember] = field(default_factory=list)  # their pods are still to come

    @property
    def since(self) -> datetime:
        return self.demands[0].since if self.demands else _NEVER

    def reservation(self, left_out: Iterable[PoolDemand]) -> list[PendingPool]:
        """What a gang that has begun still needs, so that later ones do not take it."""
        shapes = [member.shape for member in self.unseen]
        shapes += [demand.pool_spec.shape for demand in left_out if demand.pool_spec is not None]
        return [PendingPool(self.key[0], shape.chips, shape.machine_type) for shape in shapes]


def gangs_in_order(state: ClusterState) -> list[Gang]:
    """Those that have node pools first, then those that have waited longest."""
    gangs: dict[Key, Gang] = {}
    for demand in sorted(state.demands, key=lambda demand: (demand.since, demand.pod.uid)):
        key = _key_of_demand(demand, state)
        gangs.setdefault(key, Gang(key)).demands.append(demand)
    for pool in state.pools:
        owner = state.owners.get(pool.owner) if pool.managed and pool.owner else None
        gone = pool.status is PoolStatus.STOPPING or pool.parent in state.completed_jobs
        if pool.owner is None or not pool_lifetime.is_active(owner) or gone:
            continue
        key = (*pool.owner, _stage(pool.owner, pool.parent[1] if pool.parent else "", state))
        gangs.setdefault(key, Gang(key)).pools.append(pool)
    jobs = {pool.parent for pool in state.pools if pool.managed and pool.parent}
    jobs |= {(pool.namespace, pool.parent) for pool in state.creating.values()}
    jobs |= state.placed_jobs | set(state.completed_jobs)
    jobs |= {(demand.pod.namespace, _job(demand)) for demand in state.demands}
    for (namespace, name, stage), gang in gangs.items():
        owner = state.owners.get((namespace, name))
        gang.unseen = [
            member
            for job, member in (owner.members if owner else {}).items()
            if member.stage == stage and (namespace, job) not in jobs
        ]
    return sorted(gangs.values(), key=lambda gang: (not gang.pools, gang.since, gang.key))


def _key_of_demand(demand: PoolDemand, state: ClusterState) -> Key:
    spec = demand.pool_spec
    owner = (demand.pod.namespace, spec.owner_name if spec else demand.pod.owner_name)
    return (*owner, _stage(owner, _job(demand), state))


def _job(demand: PoolDemand) -> str:
    return demand.pool_spec.parent.name if demand.pool_spec else demand.pod.job


def _stage(owner: tuple[str, str], job: str, state: ClusterState) -> int:
    status = state.owners.get(owner)
    member = status.members.get(job) if status else None
    return member.stage if member else 0
