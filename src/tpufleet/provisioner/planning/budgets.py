"""Whether a pool would be more than the budget allows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tpufleet.provisioner.gke_api.pool_specs import PoolSpec
from tpufleet.provisioner.planning.cluster_state import ClusterState, PendingPool
from tpufleet.provisioner.settings import ProvisionerBudget


def over_budget(
    spec: PoolSpec, state: ClusterState, planned: Sequence[PendingPool], budget: ProvisionerBudget
) -> str:
    """In words; empty: it is within. `asked`: what this very plan asks for besides."""
    pools = [pool for pool in state.pools if pool.managed]
    coming = [*state.creating.values(), *planned]
    count = len(pools) + len(coming)
    if budget.max_pools is not None and count + 1 > budget.max_pools:
        return f"the budget allows {budget.max_pools} pools, and {count} exist"
    chips = sum(pool.chips for pool in pools) + sum(one.chips for one in coming)
    need = spec.shape.chips
    if budget.max_chips is not None and chips + need > budget.max_chips:
        return f"the budget allows {budget.max_chips} chips; {chips} are in use, {need} are wanted"
    limit = budget.max_chips_in(spec.namespace)
    here = sum(
        pool.chips for pool in pools if pool.owner and pool.owner[0] == spec.namespace
    ) + sum(one.chips for one in coming if one.namespace == spec.namespace)
    if limit is not None and here + need > limit:
        return (
            f"the budget allows namespace {spec.namespace} {limit} chips; {here} are in use, "
            f"{need} are wanted"
        )
    return ""
