"""Pools are cordoned before they are deleted. Pure.

The scheduler may bind a pod to a pool at the moment in which its last Job ends. So no new pods are
let in, then the API server is asked who is there, and only then is the pool deleted. A pool that is
being created is not deleted either, which GKE would refuse: its nodes are cordoned as they come.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import datetime, timedelta

from tpufleet_gke.provisioner.model.cluster_state import ClusterState, ObservedPool, PoolStatus
from tpufleet_gke.provisioner.planning.pool_plan import CordonPool, DeletePool, PoolPlan
from tpufleet_gke.provisioner.settings import ProvisionerSettings

# A pool that GKE calls running has nodes; the API server may show them a moment later.
NODES_LATE = timedelta(seconds=10)


def cordon_first(
    plan: PoolPlan,
    held: Collection[str],
    state: ClusterState,
    settings: ProvisionerSettings,
    now: datetime,
) -> PoolPlan:
    """The plan, with cordons in the place of deletions that are too early. `held` are pools that
    would be deleted now if GKE had not refused it a moment ago."""
    deletes: list[DeletePool] = []
    cordons: list[CordonPool] = []
    rechecks = [plan.recheck_at] if plan.recheck_at is not None else []
    for delete in plan.deletes:
        name = delete.pool.name
        since = state.cordoned_since.get(name)
        if name not in state.youngest_node_at:
            until = _nodes_expected_until(delete.pool, state, now)
            if until > now:
                rechecks.append(until)
            else:
                deletes.append(delete)
        elif not state.can_cordon:
            deletes.append(delete)
        elif since is None:
            cordons.append(CordonPool(pool=delete.pool, reason=delete.reason))
        elif since + settings.cordon_grace > now:
            rechecks.append(since + settings.cordon_grace)
        else:
            deletes.append(delete)
    wanted = {delete.pool.name for delete in plan.deletes} | set(held) | state.deleting
    cordons += [
        CordonPool(pool=pool, lift=True)
        for pool in state.pools
        if pool.name in state.cordoned
        and pool.name not in wanted
        and pool.status is not PoolStatus.STOPPING
    ]
    return replace(
        plan, deletes=tuple(deletes), cordons=tuple(cordons),
        recheck_at=min(rechecks, default=None),
    )  # fmt: skip


def _nodes_expected_until(pool: ObservedPool, state: ClusterState, now: datetime) -> datetime:
    if pool.status is PoolStatus.PROVISIONING:
        return now + NODES_LATE
    if pool.status is PoolStatus.RUNNING and pool.name in state.unused_since:
        return state.unused_since[pool.name] + NODES_LATE
    return now
