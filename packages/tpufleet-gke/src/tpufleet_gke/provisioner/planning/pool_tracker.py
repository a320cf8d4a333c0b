"""What the loop remembers between reconciliations. All of it can be lost in a restart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TypeVar

from tpufleet_gke.provisioner.model.cluster_state import (
    ERROR_STATUSES,
    ClusterState,
    ObservedPool,
    PendingPool,
    PoolFailure,
    PoolStatus,
)
from tpufleet_gke.provisioner.planning.bill import Bill
from tpufleet_gke.provisioner.planning.pool_plan import CreatePool, DeletePool
from tpufleet_gke.provisioner.planning.request_backoff import (
    KEPT_BACKOFF,
    PERMANENT_WAIT,
    PoolKind,
    RequestBackoff,
)
from tpufleet_gke.provisioner.planning.warm_pools import AdoptPool

# An accepted request whose pool GKE does not list by then was lost; it is sent again.
CREATE_LOST_AFTER = timedelta(minutes=2)
# A deletion that the listing does not show by then is sent again.
DELETE_RETRY_AFTER = timedelta(seconds=30)
# New labels that the listing does not show by then were lost; the pool is not given away again.
ADOPTION_LOST_AFTER = timedelta(minutes=2)
FORGET_AFTER = timedelta(days=1)
FORGET_KEPT_AFTER = timedelta(minutes=1)
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class PendingCreate:
    create: CreatePool
    requested_at: datetime


@dataclass(slots=True)
class PoolTracker:
    """Mappings are by pool name unless noted."""

    backoff: RequestBackoff = field(default_factory=RequestBackoff)
    bill: Bill = field(default_factory=Bill)
    pending_creates: dict[str, PendingCreate] = field(default_factory=dict)
    pending_deletes: dict[str, tuple[DeletePool, datetime]] = field(default_factory=dict)
    # As it was observed last: since when pools and owners are in their present situation.
    last: ClusterState = field(
        default_factory=lambda: ClusterState(pools=(), owners={}, demands=())
    )
    pending_adoptions: dict[str, tuple[AdoptPool, datetime]] = field(default_factory=dict)
    unadoptable: set[str] = field(default_factory=set)
    counted_failures: set[str] = field(default_factory=set)
    # Pools on which a pod was found when they were to be deleted: until when they are kept, and how
    # often that happened in a row.
    kept: dict[str, tuple[datetime, int]] = field(default_factory=dict)
    cordon_reasons: dict[str, str] = field(default_factory=dict)
    cordon_denied_until: datetime | None = None  # without the permission to

    def keep(self, pool: str, now: datetime) -> None:
        _, times = self.kept.get(pool, (now, 0))
        self.kept[pool] = (now + KEPT_BACKOFF.delay(times + 1, key=pool), times + 1)

    def can_cordon(self, now: datetime) -> bool:
        return self.cordon_denied_until is None or self.cordon_denied_until <= now

    def deny_cordons(self, now: datetime) -> None:
        """For a while: someone may grant the permission."""
        self.cordon_denied_until = now + PERMANENT_WAIT

    def observe(
        self,
        state: ClusterState,
        demanded: Collection[str],
        now: datetime,
        *,
        creating: Mapping[str, PendingPool],
        adopting: Iterable[AdoptPool],
        deleting: frozenset[str],
    ) -> ClusterState:
        """The state, with what is remembered. `demanded` are the pools for which a pod waits;
        `creating`, `adopting` and `deleting` are those with a call in flight."""
        pools = {pool.name: pool for pool in state.pools}
        managed = [pool for pool in state.pools if pool.managed]
        running = [pool for pool in state.pools if pool.status is PoolStatus.RUNNING]
        without_users = [pool for pool in running if pool.name not in state.users]
        unused = [pool for pool in without_users if pool.managed]
        running_parents = {user.parent for users in state.users.values() for user in users}
        up = [pool.name for pool in state.pools if pool.status in ERROR_STATUSES]
        up += [pool.name for pool in running]
        missing = [pool.owner for pool in managed if pool.owner and pool.owner not in state.owners]
        complete = [pool.name for pool in without_users if state.is_complete(pool)]
        idle = [
            pool.name
            for pool in unused
            if pool.parent in running_parents and pool.name not in demanded
        ]
        serves_not = [name for name in up if name in demanded]
        last = self.last
        self._observe_adoptions(pools, now)
        self.cordon_reasons = {
            name: reason for name, reason in self.cordon_reasons.items() if name in pools
        }
        self.kept = {
            name: (until, times)
            for name, (until, times) in self.kept.items()
            if name in pools and until + FORGET_KEPT_AFTER > now
        }
        pending = {name: one.create.pending_pool for name, one in self.pending_creates.items()}
        given = (*(adopt for adopt, _ in self.pending_adoptions.values()), *adopting)
        self.last = replace(
            state,
            owner_missing_since=_since(last.owner_missing_since, now, missing),
            not_serving_since=_since(last.not_serving_since, now, serves_not),
            free_since=_since(last.free_since, now, complete),
            idle_since=_since(last.idle_since, now, idle),
            unused_since=_since(last.unused_since, now, (pool.name for pool in unused)),
            adopting={adopt.pool.name: adopt.parent for adopt in given},
            unadoptable=frozenset(self.unadoptable),
            cordon_reasons=self.cordon_reasons,
            can_cordon=self.can_cordon(now),
            kept_until={name: until for name, (until, _) in self.kept.items()},
            deleting=deleting
            | {
                name
                for name, (_, requested_at) in self.pending_deletes.items()
                if requested_at + DELETE_RETRY_AFTER > now
            },
            creating={
                name: pool for name, pool in (pending | dict(creating)).items() if name not in pools
            },
        )
        return self.last

    def _observe_adoptions(self, pools: Mapping[str, ObservedPool], now: datetime) -> None:
        """Forget those that have taken effect, or were lost."""
        for name, (adopt, requested_at) in list(self.pending_adoptions.items()):
            lost = requested_at + ADOPTION_LOST_AFTER <= now
            if lost or name not in pools or pools[name].parent == adopt.parent:
                del self.pending_adoptions[name]
            if lost:
                self.unadoptable.add(name)
        self.unadoptable &= set(pools)

    def observe_failures(
        self,
        pools: Sequence[ObservedPool],
        failures: Mapping[str, PoolFailure],
        now: datetime,
    ) -> list[PoolFailure]:
        """Back off where a pool failed. Returns the failures that were not counted before."""
        failed = {pool.name for pool in pools if pool.managed and pool.failure is not None}
        new_failures = []
        for pool in pools:
            failure = failures.get(pool.name) or pool.failure
            if pool.name in failed - self.counted_failures and failure is not None:
                new_failures.append(failure)
                self.backoff.record_location_failure(
                    pool.location, PoolKind.of_pool(pool), failure, now
                )
        self.counted_failures = failed
        self.backoff.expire_before(now - FORGET_AFTER)
        return new_failures

    def take_finished_creates(
        self,
        pools: Mapping[str, ObservedPool],
        failures: Mapping[str, PoolFailure],
        now: datetime,
    ) -> list[tuple[PendingCreate, ObservedPool | None, PoolFailure | None]]:
        """Each with its running pool, its failure, or neither when the request was lost."""
        finished: list[tuple[PendingCreate, ObservedPool | None, PoolFailure | None]] = []
        for name, pending in list(self.pending_creates.items()):
            pool, failure = pools.get(name), failures.get(name)
            if pool is not None and pool.status in (PoolStatus.PROVISIONING, PoolStatus.UNKNOWN):
                continue
            if pool is not None:
                error = failure or pool.failure if pool.status in ERROR_STATUSES else None
                finished.append((pending, pool, error))
            elif failure is not None or pending.requested_at + CREATE_LOST_AFTER <= now:
                finished.append((pending, None, failure))
            else:
                continue
            del self.pending_creates[name]
        return finished

    def take_finished_deletes(self, listed: Iterable[str]) -> list[DeletePool]:
        listed_names = set(listed)
        finished = [
            delete for name, (delete, _) in self.pending_deletes.items() if name not in listed_names
        ]
        for delete in finished:
            del self.pending_deletes[delete.pool.name]
        return finished


def _since(
    before: Mapping[Key, datetime], now: datetime, present: Iterable[Key]
) -> dict[Key, datetime]:
    """Since when each has been present."""
    return {key: before.get(key, now) for key in present}
