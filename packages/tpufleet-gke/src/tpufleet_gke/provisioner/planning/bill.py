"""What node pools cost at list prices, and how much of it was unused. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from tpufleet_gke.provisioner.model.cluster_state import ClusterState, ObservedPool
from tpufleet_gke.provisioner.planning import budgets, gang_queue
from tpufleet_gke.provisioner.settings import ProvisionerSettings

# After a longer gap between two rounds, another replica led and counted.
LONGEST_GAP = timedelta(minutes=2)
KEPT_FOR = timedelta(hours=1)  # after the last node pool of an owner: long enough to be scraped


@dataclass(frozen=True, slots=True)
class Usage:
    used: timedelta = timedelta(0)  # a leader ran on it, and all slices of its gang were there
    unused: timedelta = timedelta(0)
    chips: int = 0
    dollars: float = 0.0

    def __str__(self) -> str:
        hours = self.chips * (self.used + self.unused) / timedelta(hours=1)
        unused = self.unused.total_seconds()
        return f"{hours:.1f} chip-hours, ${self.dollars:.2f}, unused for {unused:.0f} s"


@dataclass(frozen=True, slots=True)
class Charge:
    """Of one pool for one round."""

    namespace: str
    owner: str
    used: bool
    chip_seconds: float
    dollars: float


class Bill:
    """Counts while a pool has nodes."""

    def __init__(self) -> None:
        self._counted_until: datetime | None = None
        self._pools: dict[str, Usage] = {}

    def usage(self, pool: str) -> Usage | None:
        return self._pools.get(pool)

    def charge(
        self, state: ClusterState, settings: ProvisionerSettings, now: datetime
    ) -> list[Charge]:
        before, self._counted_until = self._counted_until, now
        elapsed = now - before if before is not None else timedelta(0)
        if elapsed > LONGEST_GAP:
            elapsed = timedelta(0)
        waiting = {gang.key[:2] for gang in gang_queue.gangs_in_order(state) if gang.demands}
        charges = []
        for pool in state.pools:
            if pool.managed and pool.name in state.youngest_node_at:
                users = state.users.get(pool.name, ())
                used = any(user.owner not in waiting for user in users)
                charges.append(self._charge(pool, used, elapsed, settings))
        return charges

    def forget_except(self, pools: Mapping[str, object]) -> None:
        self._pools = {name: usage for name, usage in self._pools.items() if name in pools}

    def _charge(
        self, pool: ObservedPool, used: bool, elapsed: timedelta, settings: ProvisionerSettings
    ) -> Charge:
        price = budgets.chip_hour_dollars(pool.machine_type, pool.capacity, settings) or 0.0
        dollars = pool.chips * price * (elapsed / timedelta(hours=1))
        usage = self._pools.get(pool.name, Usage())
        span = {"used": usage.used + elapsed} if used else {"unused": usage.unused + elapsed}
        self._pools[pool.name] = replace(
            usage, chips=pool.chips, dollars=usage.dollars + dollars, **span
        )
        namespace, owner = pool.owner or ("", "")
        return Charge(namespace, owner, used, pool.chips * elapsed.total_seconds(), dollars)
