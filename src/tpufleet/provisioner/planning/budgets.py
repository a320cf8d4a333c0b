"""Whether a new pool would exceed the budget. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tpufleet.provisioner.gke.pool_specs import PoolSpec
from tpufleet.provisioner.planning.cluster_state import ClusterState, PendingPool
from tpufleet.provisioner.settings import ProvisionerBudget


def over_budget(
    spec: PoolSpec, state: ClusterState, planned: Sequence[PendingPool], budget: ProvisionerBudget
) -> str:
    """Which limit the pool would exceed; empty when none. `planned` is created by the same plan."""
    pools = [pool for pool in state.pools if pool.managed]
    pending = [*state.creating.values(), *planned]
    count = len(pools) + len(pending)
    if budget.max_pools is not None and count + 1 > budget.max_pools:
        return f"over budget: {count} of {budget.max_pools} node pools in use (BUDGET_POOLS)"
    chips = sum(pool.chips for pool in pools) + sum(pool.chips for pool in pending)
    requested = spec.shape.chips
    if budget.max_chips is not None and chips + requested > budget.max_chips:
        return (
            f"over budget: {chips} of {budget.max_chips} chips in use, {requested} requested "
            "(BUDGET_CHIPS)"
        )
    limit = budget.max_chips_in(spec.namespace)
    in_namespace = sum(
        pool.chips for pool in pools if pool.owner and pool.owner[0] == spec.namespace
    ) + sum(pool.chips for pool in pending if pool.namespace == spec.namespace)
    if limit is not None and in_namespace + requested > limit:
        return (
            f"over budget: {in_namespace} of {limit} chips in use in namespace {spec.namespace}, "
            f"{requested} requested"
        )
    return ""
