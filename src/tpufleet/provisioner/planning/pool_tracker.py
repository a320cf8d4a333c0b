"""What the loop remembers from one round to the next, none of which a restart would miss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tpufleet.provisioner.gke_api.node_pools import OperationFailure
from tpufleet.provisioner.planning.cluster_state import (
    FailureCause,
    ObservedPool,
    OwnerStatus,
    PendingPool,
    PoolStatus,
    PoolUser,
)
from tpufleet.provisioner.planning.plans import CreatePool, DeletePool
from tpufleet.provisioner.planning.request_backoff import RequestBackoff

# An accepted request that never shows in a listing was lost; it is asked for again.
CREATE_LOST_AFTER = timedelta(minutes=2)
# A deletion that the listing does not confirm is sent again.
DELETE_RETRY_AFTER = timedelta(seconds=30)
FORGET_AFTER = timedelta(days=1)
ERROR_STATUSES = (PoolStatus.ERROR, PoolStatus.RUNNING_WITH_ERROR)


@dataclass(frozen=True, slots=True)
class PendingCreate:
    create: CreatePool
    requested_at: datetime


@dataclass(slots=True)
class PoolTracker:
    backoff: RequestBackoff = field(default_factory=RequestBackoff)
    pending_creates: dict[str, PendingCreate] = field(
        default_factory=dict
    )  # creations not yet settled, by pool
    pending_deletes: dict[str, tuple[DeletePool, datetime]] = field(default_factory=dict)
    owner_missing_since: dict[tuple[str, str], datetime] = field(default_factory=dict)
    not_serving_since: dict[str, datetime] = field(default_factory=dict)
    idle_since: dict[str, datetime] = field(default_factory=dict)
    counted_failures: set[str] = field(default_factory=set)  # pools whose failure has been counted

    def creating(
        self, listed: Iterable[str], calling: Mapping[str, PendingPool]
    ) -> dict[str, PendingPool]:
        """What was asked for, or is being asked for, and is not listed yet."""
        known = set(listed)
        asked = {name: asked.create.pending_pool for name, asked in self.pending_creates.items()}
        return {name: asking for name, asking in (asked | dict(calling)).items()
                if name not in known}  # fmt: skip

    def deleting(self, now: datetime) -> frozenset[str]:
        return frozenset(
            name for name, (_, at) in self.pending_deletes.items() if at + DELETE_RETRY_AFTER > now
        )

    def observe_owners(
        self,
        pools: Iterable[ObservedPool],
        owners: Mapping[tuple[str, str], OwnerStatus],
        now: datetime,
    ) -> None:
        gone = {pool.owner for pool in pools if pool.managed and pool.owner not in owners}
        self.owner_missing_since = {
            owner: self.owner_missing_since.get(owner, now) for owner in gone if owner is not None
        }

    def observe_waiting(
        self, pools: Iterable[ObservedPool], waited_for: set[str], now: datetime
    ) -> None:
        """Pools that are up, while a pod still waits for them."""
        lame = {
            pool.name
            for pool in pools
            if pool.name in waited_for and pool.status in (PoolStatus.RUNNING, *ERROR_STATUSES)
        }
        self.not_serving_since = {name: self.not_serving_since.get(name, now) for name in lame}

    def observe_idle(
        self,
        pools: Iterable[ObservedPool],
        waited_for: set[str],
        used: Mapping[str, frozenset[PoolUser]],
        now: datetime,
    ) -> None:
        """Pools that nobody runs on, while the Job that they were made for runs on another."""
        at_work = {use.parent for uses in used.values() for use in uses}
        idle = {
            pool.name
            for pool in pools
            if pool.managed and pool.status is PoolStatus.RUNNING and pool.parent in at_work
            and pool.name not in used and pool.name not in waited_for
        }  # fmt: skip
        self.idle_since = {name: self.idle_since.get(name, now) for name in idle}

    def observe_failures(
        self, pools: Iterable[ObservedPool], failures: Mapping[str, OperationFailure], now: datetime
    ) -> list[ObservedPool]:
        """Remember who is out of stock; the pools whose failure is news."""
        news = []
        unwell = {
            pool.name: pool for pool in pools if pool.managed and pool.status in ERROR_STATUSES
        }
        for name, pool in unwell.items():
            if name in self.counted_failures:
                continue
            self.counted_failures.add(name)
            news.append(pool)
            failure = failures.get(name)
            trouble = failure.cause if failure else pool.failure_cause or FailureCause.TRANSIENT
            self.backoff.record_location_failure(
                pool.location, pool.machine_type, pool.nodes, cause=trouble,
                message=(failure.message if failure else pool.message) or "it failed", now=now,
            )  # fmt: skip
        self.counted_failures &= set(unwell)
        self.backoff.expire_before(now - FORGET_AFTER)
        return news

    def take_finished_creates(
        self,
        pools: Mapping[str, ObservedPool],
        failures: Mapping[str, OperationFailure],
        now: datetime,
    ) -> list[tuple[PendingCreate, ObservedPool | None, OperationFailure | None]]:
        """Creations that ended, and how: a running pool, a failure, or lost (neither)."""
        ended = []
        for name, asked in list(self.pending_creates.items()):
            pool, failure = pools.get(name), failures.get(name)
            if pool is not None and pool.status in (PoolStatus.PROVISIONING, PoolStatus.UNKNOWN):
                continue
            if pool is not None:
                failed = failure if pool.status in ERROR_STATUSES else None
                ended.append((asked, pool, failed))
            elif failure is not None or asked.requested_at + CREATE_LOST_AFTER <= now:
                ended.append((asked, None, failure))
            else:
                continue
            del self.pending_creates[name]
        return ended

    def take_finished_deletes(self, listed: Iterable[str]) -> list[DeletePool]:
        """Deletions that came to their end."""
        known = set(listed)
        done = [delete for name, (delete, _) in self.pending_deletes.items() if name not in known]
        for delete in done:
            del self.pending_deletes[delete.pool.name]
        return done
