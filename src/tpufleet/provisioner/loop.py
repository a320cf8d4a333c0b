"""The provisioner: observe, plan, act, again and again. One replica acts; the others watch."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from datetime import datetime, timedelta
from typing import Protocol

from tpufleet.clocks import Clock
from tpufleet.errors import FleetError
from tpufleet.provisioner import keys, plans, reading
from tpufleet.provisioner.calls import Call, Calls
from tpufleet.provisioner.families import Owner
from tpufleet.provisioner.gke import NodePools
from tpufleet.provisioner.metrics import Metrics
from tpufleet.provisioner.outcomes import Outcomes
from tpufleet.provisioner.plans import Create, Delete, Plan
from tpufleet.provisioner.pods import Json
from tpufleet.provisioner.seen import Pool, PoolStatus, World
from tpufleet.provisioner.settings import Settings
from tpufleet.provisioner.telling import CREATION_FAILED, Teller
from tpufleet.provisioner.tracking import UNWELL, Tracks

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
        creator: Executor,
        deleter: Executor,
        metrics: Metrics | None = None,
        leading: Callable[[], bool] = lambda: True,
    ) -> None:
        self._cluster, self._pools, self._settings = cluster, pools, settings
        self._clock, self._teller, self._leading = clock, teller, leading
        self.metrics = metrics or Metrics()
        self.tracks = Tracks()
        self._calls = Calls(creator, deleter, self.wake)
        self._outcomes = Outcomes(self.tracks, teller, self.metrics)
        self.last_round: datetime | None = None  # the last that ended well
        self._said: set[str] = set()
        self._stir = threading.Event()
        self._closing = threading.Event()

    def wake(self) -> None:
        self._stir.set()

    def close(self) -> None:
        self._closing.set()
        self._stir.set()

    def settle(self, within: float) -> None:
        """Take in the answers of calls that end within so many seconds. Not beside a round."""
        self._calls.wait(within)
        for answer in self._calls.answers():
            self._outcomes.take(answer, self._clock.now())

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
        self.settle(within=0)
        now = self._clock.now()
        listed = self._pools.listing()
        troubled = any(pool.ours and pool.status in UNWELL for pool in listed)
        failures = self._pools.failures() if troubled or self.tracks.asked else {}
        world = self._observe(listed, now)
        self._outcomes.see(world, failures, now)
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
            stopping=self.tracks.stopping(now) | self._calls.stopping,
            creating=self.tracks.creating(names, self._calls.creating),
        )

    def _act(self, plan: Plan, world: World, now: datetime) -> None:
        if self._settings.dry_run:
            self._say(plan)
            return
        for create in plan.creates:
            call = Call(what=create, at=now, world=world)
            self._calls.start(call, functools.partial(self._create, create))
        for delete in plan.deletes:
            call = Call(what=delete, at=now, world=world, node=self._node_of(delete.pool.name))
            self._calls.start(call, functools.partial(self._delete, delete))
        for hold in plan.holds:
            if hold.failed:
                self._teller.on_pod(hold.pod, CREATION_FAILED, hold.because)

    def _say(self, plan: Plan) -> None:
        """In a dry run: what would be done, once for as long as it is the same."""
        said = set(plan.words())
        for words in sorted(said - self._said):
            log.info("dry run: %s", words)
        self._said = said

    def _create(self, create: Create) -> bool:
        self._pools.create(create.wanted.request(create.place, create.name))
        return True

    def _delete(self, delete: Delete) -> bool:
        if delete.orphan and not self._really_orphan(delete.pool):
            return False
        self._pools.delete(delete.pool.name)
        return True

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
        moving = self._calls or self.tracks.asked or self.tracks.deleted
        if moving or any(pool.ours and pool.status in MOVING for pool in world.pools):
            return self._settings.poll_interval
        due = plan.look_again - now if plan.look_again is not None else IDLE_EVERY
        return min(max(due, AT_MOST_EVERY), IDLE_EVERY)
