"""What the loop remembers between reconciliations. All of it can be lost in a restart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tpufleet_gke.provisioner.model.cluster_state import (
    ERROR_STATUSES,
    ClusterState,
    ObservedPool,
    PendingPool,
    PoolFailure,
    PoolStatus,
    PoolUser,
)
from tpufleet_gke.provisioner.model.pod_owners import OwnerStatus
from tpufleet_gke.provisioner.planning.pool_plan import CreatePool, DeletePool
from tpufleet_gke.provisioner.planning.request_backoff import (
    KEPT_BACKOFF,
    PERMANENT_WAIT,
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


@dataclass(frozen=True, slots=True)
class PendingCreate:
    create: CreatePool
    requested_at: datetime


@dataclass(slots=True)
class PoolTracker:
    """Mappings are by pool name unless noted."""

    backoff: RequestBackoff = field(default_factory=RequestBackoff)
    pending_creates: dict[str, PendingCreate] = field(default_factory=dict)
    pending_deletes: dict[str, tuple[DeletePool, datetime]] = field(default_factory=dict)
    owner_missing_since: dict[tuple[str, str], datetime] = field(default_factory=dict)  # by owner
    not_serving_since: dict[str, datetime] = field(default_factory=dict)
    free_since: dict[str, datetime] = field(default_factory=dict)
    idle_since: dict[str, datetime] = field(default_factory=dict)
    unused_since: dict[str, datetime] = field(default_factory=dict)
    pending_adoptions: dict[str, tuple[AdoptPool, datetime]] = field(default_factory=dict)
    unadoptable: set[str] = field(default_factory=set)
    counted_failures: set[str] = field(default_factory=set)
    # Pools on which a pod was found when they were to be deleted: until when they are kept, and how
    # often that happened in a row.
    kept: dict[str, tuple[datetime, int]] = field(default_factory=dict)
    cordon_reasons: dict[str, str] = field(default_factory=dict)
    cordon_denied_until: datetime | None = None  # without the permission to

    def creating(
        self, listed: Iterable[str], in_flight: Mapping[str, PendingPool]
    ) -> dict[str, PendingPool]:
        """Pools that were or are being requested and are not listed yet."""
        listed_names = set(listed)
        accepted = {
            name: pending.create.pending_pool for name, pending in self.pending_creates.items()
        }
        return {
            name: pool
            for name, pool in (accepted | dict(in_flight)).items()
            if name not in listed_names
        }

    def deleting(self, now: datetime) -> frozenset[str]:
        return frozenset(
            name
            for name, (_, requested_at) in self.pending_deletes.items()
            if requested_at + DELETE_RETRY_AFTER > now
        )

    def keep(self, pool: str, now: datetime) -> None:
        _, times = self.kept.get(pool, (now, 0))
        self.kept[pool] = (now + KEPT_BACKOFF.delay(times + 1, key=pool), times + 1)

    def kept_until(self, pools: Iterable[ObservedPool], now: datetime) -> dict[str, datetime]:
        listed = {pool.name for pool in pools}
        self.kept = {
            name: (until, times)
            for name, (until, times) in self.kept.items()
            if name in listed and until + FORGET_KEPT_AFTER > now
        }
        return {name: until for name, (until, _) in self.kept.items()}

    def can_cordon(self, now: datetime) -> bool:
        return self.cordon_denied_until is None or self.cordon_denied_until <= now

    def deny_cordons(self, now: datetime) -> None:
        """For a while: someone may grant the permission."""
        self.cordon_denied_until = now + PERMANENT_WAIT

    def observe_cordons(self, pools: Iterable[ObservedPool]) -> dict[str, str]:
        listed = {pool.name for pool in pools}
        self.cordon_reasons = {
            name: reason for name, reason in self.cordon_reasons.items() if name in listed
        }
        return self.cordon_reasons

    def observe_owners(
        self,
        pools: Iterable[ObservedPool],
        owners: Mapping[tuple[str, str], OwnerStatus],
        now: datetime,
    ) -> None:
        missing = {pool.owner for pool in pools if pool.managed and pool.owner not in owners}
        self.owner_missing_since = {
            owner: self.owner_missing_since.get(owner, now)
            for owner in missing
            if owner is not None
        }

    def observe_waiting(
        self, pools: Iterable[ObservedPool], demanded: set[str], now: datetime
    ) -> None:
        """Note pools that are up while a pod still waits for them."""
        not_serving = {
            pool.name
            for pool in pools
            if pool.name in demanded and pool.status in (PoolStatus.RUNNING, *ERROR_STATUSES)
        }
        self.not_serving_since = {
            name: self.not_serving_since.get(name, now) for name in not_serving
        }

    def observe_free(self, state: ClusterState, now: datetime) -> None:
        """Note pools that are complete and used by no leader."""
        free = [
            pool.name
            for pool in state.pools
            if pool.status is PoolStatus.RUNNING
            and pool.name not in state.users
            and state.is_complete(pool)
        ]
        self.free_since = {name: self.free_since.get(name, now) for name in free}

    def observe_idle(
        self,
        pools: Iterable[ObservedPool],
        demanded: set[str],
        users: Mapping[str, frozenset[PoolUser]],
        now: datetime,
    ) -> None:
        """Note pools without users whose own Job runs on another pool."""
        running_parents = {user.parent for of_pool in users.values() for user in of_pool}
        idle = {
            pool.name
            for pool in pools
            if pool.managed
            and pool.status is PoolStatus.RUNNING
            and pool.parent in running_parents
            and pool.name not in users
            and pool.name not in demanded
        }
        self.idle_since = {name: self.idle_since.get(name, now) for name in idle}

    def observe_unused(
        self,
        pools: Sequence[ObservedPool],
        users: Mapping[str, frozenset[PoolUser]],
        now: datetime,
    ) -> None:
        """Note running pools on which no leader runs, and adoptions that have taken effect."""
        unused = [
            pool.name
            for pool in pools
            if pool.managed and pool.status is PoolStatus.RUNNING and pool.name not in users
        ]
        self.unused_since = {name: self.unused_since.get(name, now) for name in unused}
        parents = {pool.name: pool.parent for pool in pools}
        for name, (adopt, requested_at) in list(self.pending_adoptions.items()):
            lost = requested_at + ADOPTION_LOST_AFTER <= now
            if lost or parents.get(name, adopt.parent) == adopt.parent:
                del self.pending_adoptions[name]
            if lost:
                self.unadoptable.add(name)
        self.unadoptable &= set(parents)

    def adopting(self, in_flight: Iterable[AdoptPool]) -> dict[str, tuple[str, str]]:
        pending = (adopt for adopt, _ in self.pending_adoptions.values())
        return {adopt.pool.name: adopt.parent for adopt in (*pending, *in_flight)}

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
                    pool.location, pool.machine_type, pool.nodes, failure, now
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
