"""Whether a pool would be more than the budget allows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tpufleet.provisioner.pools import Wanted
from tpufleet.provisioner.seen import Asking, World
from tpufleet.provisioner.settings import Budget


def excess(wanted: Wanted, world: World, asked: Sequence[Asking], budget: Budget) -> str:
    """In words; empty: it is within. `asked`: what this very plan asks for besides."""
    pools = [pool for pool in world.pools if pool.ours]
    coming = [*world.creating.values(), *asked]
    count = len(pools) + len(coming)
    if budget.pools is not None and count + 1 > budget.pools:
        return f"the budget allows {budget.pools} pools, and {count} exist"
    chips = sum(pool.chips for pool in pools) + sum(one.chips for one in coming)
    need = wanted.shape.chips
    if budget.chips is not None and chips + need > budget.chips:
        return f"the budget allows {budget.chips} chips; {chips} are in use, {need} are wanted"
    limit = budget.chips_in(wanted.namespace)
    here = sum(
        pool.chips for pool in pools if pool.owner and pool.owner[0] == wanted.namespace
    ) + sum(one.chips for one in coming if one.namespace == wanted.namespace)
    if limit is not None and here + need > limit:
        return (
            f"the budget allows namespace {wanted.namespace} {limit} chips; {here} are in use, "
            f"{need} are wanted"
        )
    return ""
