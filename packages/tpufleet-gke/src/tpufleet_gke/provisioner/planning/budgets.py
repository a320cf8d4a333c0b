"""Whether a new pool would exceed the budget. Pure.

Dollars are list prices per hour, as `model.prices` has them; the setting CHIP_HOUR_DOLLARS replaces
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import prices, topology
from tpufleet_gke.provisioner.model.cluster_state import ClusterState, ObservedPool, PendingPool
from tpufleet_gke.provisioner.model.pool_specs import PoolCapacity, PoolSpec
from tpufleet_gke.provisioner.settings import ProvisionerBudget


def over_budget(
    spec: PoolSpec, state: ClusterState, planned: Sequence[PendingPool], budget: ProvisionerBudget
) -> str:
    """Which limit the pool would exceed; empty when none. `planned` is created by the same plan."""
    pools = [pool for pool in state.pools if pool.managed]
    pending = [*state.creating.values(), *planned]
    own_pools = [pool for pool in pools if pool.owner and pool.owner[0] == spec.namespace]
    own_pending = [pool for pool in pending if pool.namespace == spec.namespace]
    return _over_total(spec, pools, pending, budget) or _over_namespace(
        spec, own_pools, own_pending, budget
    )


def _over_total(
    spec: PoolSpec,
    pools: Sequence[ObservedPool],
    pending: Sequence[PendingPool],
    budget: ProvisionerBudget,
) -> str:
    count, chips, requested = len(pools) + len(pending), _chips(pools, pending), spec.shape.chips
    if budget.max_pools is not None and count + 1 > budget.max_pools:
        return f"over budget: {count} of {budget.max_pools} node pools in use (BUDGET_POOLS)"
    if budget.max_chips is not None and chips + requested > budget.max_chips:
        return (
            f"over budget: {chips} of {budget.max_chips} chips in use, {requested} requested "
            "(BUDGET_CHIPS)"
        )
    return _over_dollars(spec, pools, pending, budget, budget.max_dollars, "")


def _over_namespace(
    spec: PoolSpec,
    pools: Sequence[ObservedPool],
    pending: Sequence[PendingPool],
    budget: ProvisionerBudget,
) -> str:
    namespace, requested = spec.namespace, spec.shape.chips
    count, limit = len(pools) + len(pending), budget.max_pools_in(namespace)
    if limit is not None and count + 1 > limit:
        return f"over budget: {count} of {limit} node pools in use in namespace {namespace}"
    chips, limit = _chips(pools, pending), budget.max_chips_in(namespace)
    if limit is not None and chips + requested > limit:
        return (
            f"over budget: {chips} of {limit} chips in use in namespace {namespace}, "
            f"{requested} requested"
        )
    where = f" in namespace {namespace}"
    return _over_dollars(spec, pools, pending, budget, budget.max_dollars_in(namespace), where)


def _over_dollars(
    spec: PoolSpec,
    pools: Sequence[ObservedPool],
    pending: Sequence[PendingPool],
    budget: ProvisionerBudget,
    limit: float | None,
    where: str,
) -> str:
    """A machine without a known price is never bought under such a limit."""
    if limit is None:
        return ""
    machine = spec.shape.machine_type
    # The most expensive of the locations that may be tried.
    costs = [chip_hour_dollars(machine, location.capacity, budget) for location in spec.locations]
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(costs):
        return (
            f"over budget: the price of {machine} is unknown, and dollars are limited{where}; set "
            "CHIP_HOUR_DOLLARS"
        )
    requested = spec.shape.chips * max(known, default=0.0)
    used = sum(
        pool.chips * (chip_hour_dollars(pool.machine_type, pool.capacity, budget) or 0.0)
        for pool in pools
    ) + sum(
        pool.chips * (chip_hour_dollars(pool.machine_type, pool.capacity, budget) or 0.0)
        for pool in pending
    )
    if used + requested <= limit:
        return ""
    return (
        f"over budget: ${used:.2f} of ${limit:.2f} per hour in use{where}, ${requested:.2f} "
        "requested"
    )


def chip_hour_dollars(
    machine_type: str, capacity: PoolCapacity, budget: ProvisionerBudget
) -> float | None:
    """None where no price is known. Spot is the only kind with a lower price."""
    generation = _generations().get(machine_type)
    if generation is None:
        return None
    if generation in budget.chip_hour_dollars:
        return budget.chip_hour_dollars[generation]
    kind = Capacity.SPOT if capacity is PoolCapacity.SPOT else Capacity.ON_DEMAND
    price = prices.price_table().get((generation, kind))
    return price.usd if price is not None else None


@cache
def _generations() -> dict[str, str]:
    """By machine type."""
    return {
        each.machine_type: each.generation
        for each in topology.all_types().values()
        if each.machine_type is not None
    }


def _chips(pools: Sequence[ObservedPool], pending: Sequence[PendingPool]) -> int:
    return sum(pool.chips for pool in pools) + sum(pool.chips for pool in pending)
