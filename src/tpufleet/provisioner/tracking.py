"""What the loop remembers from one round to the next, none of which a restart would miss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tpufleet.provisioner.gke import Failure
from tpufleet.provisioner.plans import Create, Delete
from tpufleet.provisioner.refusals import Refusals
from tpufleet.provisioner.seen import Asking, Owner, Pool, PoolStatus, Trouble, Use

# An accepted request that never shows in a listing was lost; it is asked for again.
LOST_AFTER = timedelta(minutes=2)
# A deletion that the listing does not confirm is sent again.
DELETE_AGAIN_AFTER = timedelta(seconds=30)
FORGET_AFTER = timedelta(days=1)
UNWELL = (PoolStatus.ERROR, PoolStatus.RUNNING_WITH_ERROR)


@dataclass(frozen=True, slots=True)
class Asked:
    create: Create
    at: datetime


@dataclass(slots=True)
class Tracks:
    refusals: Refusals = field(default_factory=Refusals)
    asked: dict[str, Asked] = field(default_factory=dict)  # creations not yet settled, by pool
    deleted: dict[str, tuple[Delete, datetime]] = field(default_factory=dict)
    missing_since: dict[tuple[str, str], datetime] = field(default_factory=dict)
    lame_since: dict[str, datetime] = field(default_factory=dict)
    idle_since: dict[str, datetime] = field(default_factory=dict)
    charged: set[str] = field(default_factory=set)  # pools whose failure has been counted

    def creating(
        self, listed: Iterable[str], calling: Mapping[str, Asking]
    ) -> dict[str, Asking]:
        """What was asked for, or is being asked for, and is not listed yet."""
        known = set(listed)
        asked = {name: asked.create.asking for name, asked in self.asked.items()}
        return {name: asking for name, asking in (asked | dict(calling)).items()
                if name not in known}  # fmt: skip

    def stopping(self, now: datetime) -> frozenset[str]:
        return frozenset(
            name for name, (_, at) in self.deleted.items() if at + DELETE_AGAIN_AFTER > now
        )

    def see_owners(
        self, pools: Iterable[Pool], owners: Mapping[tuple[str, str], Owner], now: datetime
    ) -> None:
        gone = {pool.owner for pool in pools if pool.ours and pool.owner not in owners}
        self.missing_since = {
            owner: self.missing_since.get(owner, now) for owner in gone if owner is not None
        }

    def see_waiting(self, pools: Iterable[Pool], waited_for: set[str], now: datetime) -> None:
        """Pools that are up, while a pod still waits for them."""
        lame = {
            pool.name
            for pool in pools
            if pool.name in waited_for and pool.status in (PoolStatus.RUNNING, *UNWELL)
        }
        self.lame_since = {name: self.lame_since.get(name, now) for name in lame}

    def see_idle(
        self,
        pools: Iterable[Pool],
        waited_for: set[str],
        used: Mapping[str, frozenset[Use]],
        now: datetime,
    ) -> None:
        """Pools that nobody runs on, while the Job that they were made for runs on another."""
        at_work = {use.parent for uses in used.values() for use in uses}
        idle = {
            pool.name
            for pool in pools
            if pool.ours and pool.status is PoolStatus.RUNNING and pool.parent in at_work
            and pool.name not in used and pool.name not in waited_for
        }  # fmt: skip
        self.idle_since = {name: self.idle_since.get(name, now) for name in idle}

    def see_troubles(
        self, pools: Iterable[Pool], failures: Mapping[str, Failure], now: datetime
    ) -> list[Pool]:
        """Remember who is out of stock; the pools whose failure is news."""
        news = []
        unwell = {pool.name: pool for pool in pools if pool.ours and pool.status in UNWELL}
        for name, pool in unwell.items():
            if name in self.charged:
                continue
            self.charged.add(name)
            news.append(pool)
            failure = failures.get(name)
            trouble = failure.trouble if failure else pool.trouble or Trouble.PASSING
            self.refusals.refuse_place(
                pool.place, pool.machine_type, pool.nodes, trouble=trouble,
                words=(failure.words if failure else pool.words) or "it failed", now=now,
            )  # fmt: skip
        self.charged &= set(unwell)
        self.refusals.forget_before(now - FORGET_AFTER)
        return news

    def settle(
        self, pools: Mapping[str, Pool], failures: Mapping[str, Failure], now: datetime
    ) -> list[tuple[Asked, Pool | None, Failure | None]]:
        """Creations that ended, and how: a running pool, a failure, or lost (neither)."""
        ended = []
        for name, asked in list(self.asked.items()):
            pool, failure = pools.get(name), failures.get(name)
            if pool is not None and pool.status in (PoolStatus.PROVISIONING, PoolStatus.UNKNOWN):
                continue
            if pool is not None:
                failed = failure if pool.status in UNWELL else None
                ended.append((asked, pool, failed))
            elif failure is not None or asked.at + LOST_AFTER <= now:
                ended.append((asked, None, failure))
            else:
                continue
            del self.asked[name]
        return ended

    def gone(self, listed: Iterable[str]) -> list[Delete]:
        """Deletions that came to their end."""
        known = set(listed)
        done = [delete for name, (delete, _) in self.deleted.items() if name not in known]
        for delete in done:
            del self.deleted[delete.pool.name]
        return done
