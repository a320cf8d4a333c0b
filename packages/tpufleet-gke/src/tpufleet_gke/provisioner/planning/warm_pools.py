"""Pools that are kept for a while after their JobSet has ended, and given to the next one of the
same kind. Pure.

A pool changes hands by new labels, which GKE applies to running nodes:
https://cloud.google.com/kubernetes-engine/docs/how-to/update-existing-nodepools
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from tpufleet_gke.provisioner.model import label_keys
from tpufleet_gke.provisioner.model.cluster_state import (
    ClusterState,
    ObservedPool,
    PendingPool,
    PodRef,
    PoolStatus,
)
from tpufleet_gke.provisioner.model.pool_specs import COPIED_SELECTORS, PoolCapacity, PoolSpec
from tpufleet_gke.provisioner.planning import budgets, pool_needs
from tpufleet_gke.provisioner.settings import NodeNetwork, ProvisionerSettings

DEFAULT_SERVICE_ACCOUNT = "default"  # what GKE lists where none was requested


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptPool:
    """Give a warm pool to the Job of a waiting pod."""

    pool: ObservedPool
    spec: PoolSpec
    pod: PodRef

    @property
    def parent(self) -> tuple[str, str]:
        return self.spec.namespace, self.spec.parent.name

    @property
    def labels(self) -> dict[str, str]:
        """All labels of the pool from now on."""
        request = self.spec.create_request(self.pool.location, self.pool.name)
        labels: dict[str, str] = request["config"]["labels"]
        return labels


def is_warm(pool: ObservedPool, state: ClusterState, settings: ProvisionerSettings) -> bool:
    """Whether the pool is kept for a later JobSet: complete, unused, and its own JobSet is over.
    Flex-start nodes are not kept: GKE limits how long they run, and removes unused ones."""
    return (
        settings.warm_pool_ttl.total_seconds() > 0
        and pool.managed
        and pool.owner is not None
        and pool.status is PoolStatus.RUNNING
        and pool.capacity is not PoolCapacity.FLEX_START
        and state.ready_nodes.get(pool.name, 0) >= pool.nodes > 0
        and state.ready_chips.get(pool.name, 0) >= pool.chips
        and pool.name in state.unused_since
        and pool.name not in state.deleting
        and _is_over(pool, state)
    )


def is_changing(pool: ObservedPool, state: ClusterState, settings: ProvisionerSettings) -> bool:
    """Whether GKE is working on a pool that is kept: perhaps it gets the labels of another Job,
    which a provisioner requested that was restarted since."""
    return (
        settings.warm_pool_ttl.total_seconds() > 0
        and pool.managed
        and pool.owner is not None
        and pool.status is PoolStatus.RECONCILING
        and _is_over(pool, state)
    )


def changing_for(
    spec: PoolSpec, state: ClusterState, settings: ProvisionerSettings
) -> ObservedPool | None:
    """A pool of this kind that GKE is working on, and that may soon serve the pod."""
    taken = state.adopting
    return next(
        (
            pool
            for pool in state.pools
            if pool.name not in taken
            and is_changing(pool, state, settings)
            and _is_same_kind(pool, spec)
        ),
        None,
    )


def adoptable(
    spec: PoolSpec, state: ClusterState, settings: ProvisionerSettings
) -> Iterator[ObservedPool]:
    """Warm pools that would serve this pod once they have its labels."""
    for pool in state.pools:
        if (
            pool.name not in state.adopting
            and pool.name not in state.unadoptable
            and is_warm(pool, state, settings)
            and _is_same_kind(pool, spec)
        ):
            yield pool


def pools_to_evict(
    specs: Sequence[PoolSpec],
    state: ClusterState,
    planned: Collection[PendingPool],
    settings: ProvisionerSettings,
    warm: Collection[ObservedPool],
    deleting: Collection[str],
) -> list[ObservedPool] | None:
    """The warm pools to delete so that the pools stay within the budget, longest unused first;
    empty when those that are being deleted suffice, None when all of them would not."""
    kept = [pool for pool in state.pools if pool.name not in deleting]
    evicted: list[ObservedPool] = []
    # A pool of another namespace does not help against a limit of this one.
    candidates = sorted(
        warm,
        key=lambda pool: (
            pool.owner is None or pool.owner[0] != specs[0].namespace,
            state.unused_since[pool.name],
        ),
    )
    while budgets.over_budget(specs, replace(state, pools=kept), list(planned), settings):
        if not candidates:
            return None
        evicted.append(candidates.pop(0))
        kept = [pool for pool in kept if pool.name != evicted[-1].name]
    return evicted


def _is_over(pool: ObservedPool, state: ClusterState) -> bool:
    owner = state.owners.get(pool.owner) if pool.owner else None
    if pool.parent in state.completed_jobs:
        return True
    if owner is None or owner.ended_at is not None:
        return True
    uid = pool.labels.get(label_keys.OWNER_UID)
    return bool(uid and uid != owner.uid)


def _is_same_kind(pool: ObservedPool, spec: PoolSpec) -> bool:
    """In all but the labels, which are changed. Only within a namespace: the nodes may have a
    service account and images that another team must not get."""
    account = spec.node_config.get("serviceAccount") or DEFAULT_SERVICE_ACCOUNT
    networks = spec.pool_config.get("networkConfig", {}).get("additionalNodeNetworkConfigs", [])
    wanted = spec.node_config["labels"]
    return (
        pool.owner is not None
        and pool.owner[0] == spec.namespace
        and pool.location in spec.locations
        and not pool_needs.unmet_config(pool, spec)
        and (pool.service_account or DEFAULT_SERVICE_ACCOUNT) == account
        and pool_needs.same_networks(pool.networks, [NodeNetwork(**each) for each in networks])
        and all(pool.labels.get(key) == wanted.get(key) for key in COPIED_SELECTORS)
    )
