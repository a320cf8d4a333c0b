"""Whether a new pool would exceed the budget. Pure.

Dollars are list prices per hour, as `model.prices` has them; the setting CHIP_HOUR_DOLLARS replaces
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import prices, type_lookup
from tpufleet_gke.provisioner.model.cluster_state import ClusterState, ObservedPool, PendingPool
from tpufleet_gke.provisioner.model.pool_specs import PoolCapacity, PoolSpec
from tpufleet_gke.provisioner.settings import Limit, ProvisionerSettings

Pool = ObservedPool | PendingPool


def over_budget(
    specs: Sequence[PoolSpec],
    state: ClusterState,
    planned: Sequence[PendingPool],
    settings: ProvisionerSettings,
) -> str:
    """Which limit these pools of one namespace would exceed together; empty when none. `planned` is
    created by the same plan."""
    namespace, costs = specs[0].namespace, [_requested_dollars(spec, settings) for spec in specs]
    unknown = [spec for spec, cost in zip(specs, costs, strict=True) if cost is None]
    requested_dollars = None if unknown else sum(cost or 0.0 for cost in costs)
    pools: list[tuple[str, Pool]] = [
        (pool.owner[0] if pool.owner else "", pool) for pool in state.pools if pool.managed
    ]
    pools += [(pool.namespace, pool) for pool in (*state.creating.values(), *planned)]

    def dollars(pool: Pool) -> float:
        price = chip_hour_dollars(pool.machine_type, pool.capacity, settings)
        return pool.chips * (price or 0.0)

    measures: list[tuple[str, Limit, float | None, Callable[[Pool], float]]] = [
        ("pools", settings.budget_pools, len(specs), lambda _: 1),
        ("chips", settings.budget_chips, sum(spec.shape.chips for spec in specs), _chips),
        ("dollars", settings.budget_dollars, requested_dollars, dollars),
    ]
    for unit, limit, more, measure in measures:
        for scope, most in (("", limit.total), (namespace, limit.of(namespace))):
            if most is None:
                continue
            if more is None:
                machine = unknown[0].shape.machine_type
                return f"over budget: the price of {machine} is unknown; set CHIP_HOUR_DOLLARS"
            used = sum(measure(pool) for owner, pool in pools if scope in ("", owner))
            if used + more > most:
                where = f" in namespace {scope}" if scope else ""
                return (
                    f"over budget: {used:.10g} of {most:.10g} {unit} in use{where}, {more:.10g} "
                    f"requested (BUDGET_{unit.upper()})"
                )
    return ""


def _chips(pool: Pool) -> float:
    return pool.chips


def _requested_dollars(spec: PoolSpec, settings: ProvisionerSettings) -> float | None:
    """In the most expensive of the locations that may be tried; None where a price is unknown."""
    machine = spec.shape.machine_type
    costs = [chip_hour_dollars(machine, location.capacity, settings) for location in spec.locations]
    known = [cost for cost in costs if cost is not None]
    return spec.shape.chips * max(known, default=0.0) if len(known) == len(costs) else None


def chip_hour_dollars(
    machine_type: str, capacity: PoolCapacity, settings: ProvisionerSettings
) -> float | None:
    """None where no price is known. Spot is the only kind with a lower price."""
    generation = _generations().get(machine_type)
    if generation is None:
        return None
    if generation in settings.chip_hour_dollars:
        return settings.chip_hour_dollars[generation]
    kind = Capacity.SPOT if capacity is PoolCapacity.SPOT else Capacity.ON_DEMAND
    price = _list_prices().get((generation, kind))
    return price.usd if price is not None else None


_list_prices = cache(prices.price_table)  # once, not for each pool in each round


@cache
def _generations() -> dict[str, str]:
    """By machine type."""
    return {
        each.machine_type: each.generation
        for each in type_lookup.all_types().values()
        if each.machine_type is not None
    }
