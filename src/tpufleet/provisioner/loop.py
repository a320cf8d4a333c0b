"""The provisioner: observe, plan, act, again and again. One replica acts; the others watch."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from datetime import datetime, timedelta
from typing import Protocol

from tpufleet.clocks import Clock
from tpufleet.errors import Conflict, FleetError
from tpufleet.provisioner import keys, plans, reading, shapes, troubles
from tpufleet.provisioner.families import Owner
from tpufleet.provisioner.gke import Failure, NodePools
from tpufleet.provisioner.metrics import Metrics
from tpufleet.provisioner.plans import Create, Delete, Plan
from tpufleet.provisioner.pods import Json
from tpufleet.provisioner.seen import Pool, PoolStatus, Trouble, World
from tpufleet.provisioner.settings import Settings
from tpufleet.provisioner.telling import (
    CREATION_FAILED,
    CREATION_STARTED,
    CREATION_SUCCEEDED,
    DELETION_FAILED,
    DELETION_STARTED,
    DELETION_SUCCEEDED,
    NOT_FOUND,
    Teller,
)
from tpufleet.provisioner.tracking import UNWELL, Asked, Tracks

log = logging.getLogger("tpufleet.provisioner")

IDLE_EVERY = timedelta(seconds=60)  # orphans are found this late at worst
AT_MOST_EVERY = timedelta(milliseconds=250)  # news comes in bursts
MOVING = (PoolStatus.PROVISIONING, PoolStatus.RECONCILING, PoolStatus.STOPPING)


class Cluster(Protocol):
    """The Kubernetes side."""

    def pods(self) -> Sequence[Json]: ...
    def owners(self) -> Mapping[tuple[str, str], Owner]: ...
    def nodes(self) -> Sequence[Json]: ...

    def owner_now(self, namespace: str, name: str) -> Owner | None:
        """Asked of the server itself: what was watched may be stale."""
        ...


class Provisioner:
    def __init__(
        self,
        cluster: Cluster,
        pools: NodePools,
        settings: Settings,
        *,
        clock: Clock,
        teller: Teller,
        executor: Executor,
        metrics: Metrics | None = None,
        leading: Callable[[], bool] = lambda: True,
    ) -> None:
        self._cluster, self._pools, self._settings = cluster, pools, settings
        self._clock, self._teller, self._executor = clock, teller, executor
        self._leading = leading
        self.metrics = metrics or Metrics()
        self.tracks = Tracks()
        self.last_round: datetime | None = None  # the last that ended well
        self._said: set[str] = set()
        self._stir = threading.Event()
        self._closing = threading.Event()

    def wake(self) -> None:
        self._stir.set()

    def close(self) -> None:
        self._closing.set()
        self._stir.set()

    def run(self) -> None:
        """Until closed."""
        wait = timedelta(0)
        while not self._closing.is_set():
            self._stir.wait(wait.total_seconds())
            self._stir.clear()
            if self._closing.is_set():
                return
            try:
                wait = self.round() if self._leading() else self._settings.poll_interval
                self.metrics.count("tpu_provisioner_rounds_total", outcome="done")
            except Exception as error:
                wait = self._settings.poll_interval
                self.metrics.count("tpu_provisioner_rounds_total", outcome="failed")
                if isinstance(error, FleetError):
                    log.warning("a round failed: %s", error)
                else:
                    log.exception("a round failed; the next follows")
            self.metrics.gauge("tpu_provisioner_leading", {(): float(self._leading())})
            self._closing.wait(AT_MOST_EVERY.total_seconds())

    def round(self) -> timedelta:
        """Once over everything; how long until the next is due."""
        now = self._clock.now()
        listed = self._pools.listing()
        troubled = any(pool.ours and pool.status in UNWELL for pool in listed)
        failures = self._pools.failures() if troubled or self.tracks.asked else {}
        world = self._observe(listed, now)
        self._report_ended(world, failures, now)
        plan = plans.plan(world, self.tracks.refusals, self._settings, now)
        self._act(plan, world, now)
        self._measure(world)
        self.last_round = now
        return self._next(plan, world, now)

    def _observe(self, listed: Sequence[Pool], now: datetime) -> World:
        owners = self._cluster.owners()
        pods = self._cluster.pods()
        demands = reading.demands(pods, owners, self._settings)
        nodes = [
            node for node in self._cluster.nodes()
            if (node["metadata"].get("labels") or {}).get(keys.MANAGER) == keys.MANAGED_BY_US
        ]  # fmt: skip
        waited_for = {
            pool.name
            for demand in demands
            if demand.wanted is not None
            for pool in listed
            if pool.parent == (demand.wanted.namespace, demand.wanted.parent.name)
        }
        names = [pool.name for pool in listed]
        self.tracks.see_owners(listed, owners, now)
        self.tracks.see_waiting(listed, waited_for, now)
        used = reading.used(pods, nodes, self._settings)
        self.tracks.see_idle(listed, waited_for, used, now)
        self._teller.forget({demand.pod.uid for demand in demands})
        return World(
            pools=listed,
            owners=owners,
            demands=demands,
            youngest_node=reading.youngest(nodes),
            ready_nodes=reading.ready(nodes),
            used=used,
            idle_since=self.tracks.idle_since,
            missing_since=self.tracks.missing_since,
            lame_since=self.tracks.lame_since,
            stopping=self.tracks.stopping(now),
            creating=self.tracks.creating(names),
        )

    def _report_ended(
        self, world: World, failures: dict[str, Failure], now: datetime
    ) -> None:
        by_name = {pool.name: pool for pool in world.pools}
        for pool in self.tracks.see_troubles(world.pools, failures, now):
            failure = failures.get(pool.name)
            trouble = failure.trouble if failure else pool.trouble or Trouble.PASSING
            self.metrics.count("tpu_provisioner_pool_failures_total", trouble=trouble.name.lower())
        for asked, pool, failure in self.tracks.settle(by_name, failures, now):
            self._report_creation(asked, pool, failure, now)
        for delete in self.tracks.gone(by_name):
            words = f"node pool {delete.pool.name} is gone"
            self._teller.on_pool(delete.pool, None, world, DELETION_SUCCEEDED, words)

    def _report_creation(
        self, asked: Asked, pool: Pool | None, failure: Failure | None, now: datetime
    ) -> None:
        create = asked.create
        if pool is not None and pool.status not in UNWELL:
            self.tracks.refusals.granted(create.place, pool.machine_type, pool.nodes)
            spent = (now - asked.at).total_seconds()
            self.metrics.observe("tpu_provisioner_provisioning_seconds", spent)
            words = f"node pool {create.name} runs in {create.place}"
            self._teller.on_pod(create.pod, CREATION_SUCCEEDED, words)
            return
        words = (failure.words if failure else pool.words if pool else "") or "it never appeared"
        words = shapes.told(create.wanted.shape, words)
        told = f"node pool {create.name} in {create.place}: {words}"
        if pool is None:
            trouble = failure.trouble if failure else Trouble.PASSING
            self._refuse(create, trouble, words, now)
        self._teller.on_pod(create.pod, CREATION_FAILED, told)

    def _act(self, plan: Plan, world: World, now: datetime) -> None:
        if self._settings.dry_run:
            self._say(plan)
            return
        calls = [self._executor.submit(self._create, one, now) for one in plan.creates]
        calls += [self._executor.submit(self._delete, one, world, now) for one in plan.deletes]
        for call in calls:
            call.result()  # each starts an operation and returns; none waits for it
        for hold in plan.holds:
            if hold.failed:
                self._teller.on_pod(hold.pod, CREATION_FAILED, hold.because)

    def _say(self, plan: Plan) -> None:
        """In a dry run: what would be done, once for as long as it is the same."""
        said = set(plan.words())
        for words in sorted(said - self._said):
            log.info("dry run: %s", words)
        self._said = said

    def _create(self, create: Create, now: datetime) -> None:
        try:
            self._pools.create(create.wanted.request(create.place, create.name))
        except Conflict:
            outcome = "exists"  # made by an earlier call whose answer was lost; the listing has it
        except FleetError as error:
            trouble, words = troubles.of_error(error), shapes.told(create.wanted.shape, str(error))
            self._refuse(create, trouble, words, now)
            self.metrics.count("tpu_provisioner_calls_total", verb="create", outcome="refused")
            self.metrics.count("tpu_provisioner_pool_failures_total", trouble=trouble.name.lower())
            self._teller.on_pod(create.pod, CREATION_FAILED, f"node pool {create.name}: {words}")
            return
        else:
            outcome = "started"
            self._teller.on_pod(
                create.pod, CREATION_STARTED, f"node pool {create.name} in {create.place}"
            )
        self.tracks.asked[create.name] = Asked(create, now)
        self.metrics.count("tpu_provisioner_calls_total", verb="create", outcome=outcome)

    def _refuse(self, create: Create, trouble: Trouble, words: str, now: datetime) -> None:
        if trouble in (Trouble.STOCK, Trouble.QUOTA):
            shape = create.wanted.shape
            self.tracks.refusals.refuse_place(
                create.place, shape.machine_type, shape.nodes, trouble=trouble, words=words, now=now
            )
        else:
            self.tracks.refusals.refuse_pool(create.wanted, trouble, words, now)

    def _delete(self, delete: Delete, world: World, now: datetime) -> None:
        pool = delete.pool
        node = self._node_of(pool.name)
        try:
            if delete.orphan and not self._really_orphan(pool):
                return
            self._pools.delete(pool.name)
        except FleetError as error:
            self.metrics.count("tpu_provisioner_calls_total", verb="delete", outcome="refused")
            self._teller.on_pool(pool, node, world, DELETION_FAILED, f"{pool.name}: {error}")
            return
        self.metrics.count("tpu_provisioner_calls_total", verb="delete", outcome="started")
        owner = world.owners.get(pool.owner) if pool.owner else None
        if owner is not None and owner.ended_at is not None:
            spent = (now - owner.ended_at).total_seconds()
            self.metrics.observe("tpu_provisioner_deletion_seconds", max(spent, 0))
        self.tracks.deleted[pool.name] = (delete, now)
        words = f"node pool {pool.name}: {delete.because}"
        self._teller.on_pool(pool, node, world, DELETION_STARTED, words)
        if delete.orphan and node is None and pool.status is PoolStatus.RUNNING:
            self._teller.on_pool(pool, None, world, NOT_FOUND, f"{pool.name} had no nodes")

    def _really_orphan(self, pool: Pool) -> bool:
        assert pool.owner is not None
        found = self._cluster.owner_now(*pool.owner)
        uid = pool.labels.get(keys.OWNER_UID)
        return found is None or bool(uid and found.uid != uid)

    def _node_of(self, pool: str) -> str | None:
        for node in self._cluster.nodes():
            if (node["metadata"].get("labels") or {}).get(keys.POOL) == pool:
                return str(node["metadata"]["name"])
        return None

    def _measure(self, world: World) -> None:
        ours = [pool for pool in world.pools if pool.ours]
        states = Counter(pool.status for pool in ours)
        self.metrics.gauge(
            "tpu_provisioner_pools",
            {(("state", status.lower()),): states.get(status, 0) for status in PoolStatus},
        )
        self.metrics.gauge("tpu_provisioner_chips", {(): sum(pool.chips for pool in ours)})
        self.metrics.gauge("tpu_provisioner_waiting_pods", {(): len(world.demands)})

    def _next(self, plan: Plan, world: World, now: datetime) -> timedelta:
        moving = plan.creates or plan.deletes or self.tracks.asked or self.tracks.deleted
        if moving or any(pool.ours and pool.status in MOVING for pool in world.pools):
            return self._settings.poll_interval
        due = plan.look_again - now if plan.look_again is not None else IDLE_EVERY
        return min(max(due, AT_MOST_EVERY), IDLE_EVERY)
