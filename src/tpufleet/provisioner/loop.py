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
from tpufleet.provisioner.gke_api.calls import GkeCall, InFlightCalls
from tpufleet.provisioner.gke_api.node_pools import NodePools
from tpufleet.provisioner.kube import label_keys, observations
from tpufleet.provisioner.kube.pod_owners import OwnerStatus
from tpufleet.provisioner.kube.pods import Json
from tpufleet.provisioner.kube.pool_events import CREATE_FAILED, EventReporter
from tpufleet.provisioner.metrics import Metrics
from tpufleet.provisioner.planning import plans
from tpufleet.provisioner.planning.cluster_state import ClusterState, ObservedPool, PoolStatus
from tpufleet.provisioner.planning.plans import CreatePool, DeletePool, PoolPlan
from tpufleet.provisioner.planning.pool_tracker import ERROR_STATUSES, PoolTracker
from tpufleet.provisioner.result_handler import ResultHandler
from tpufleet.provisioner.settings import ProvisionerSettings

log = logging.getLogger("tpufleet.provisioner")

IDLE_INTERVAL = timedelta(seconds=60)  # orphans are found this late at worst
MIN_INTERVAL = timedelta(milliseconds=250)  # news comes in bursts
TRANSITIONAL = (PoolStatus.PROVISIONING, PoolStatus.RECONCILING, PoolStatus.STOPPING)


class ClusterView(Protocol):
    """The Kubernetes side."""

    def pods(self) -> Sequence[Json]: ...
    def owners(self) -> Mapping[tuple[str, str], OwnerStatus]: ...
    def nodes(self) -> Sequence[Json]: ...

    def fetch_owner(self, namespace: str, name: str) -> OwnerStatus | None:
        """Asked of the server itself: what was watched may be stale."""
        ...


class Provisioner:
    def __init__(
        self,
        cluster: ClusterView,
        pools: NodePools,
        settings: ProvisionerSettings,
        *,
        clock: Clock,
        reporter: EventReporter,
        create_executor: Executor,
        delete_executor: Executor,
        metrics: Metrics | None = None,
        is_leader: Callable[[], bool] = lambda: True,
    ) -> None:
        self._cluster, self._pools, self._settings = cluster, pools, settings
        self._clock, self._teller, self._leading = clock, reporter, is_leader
        self.metrics = metrics or Metrics()
        self.tracker = PoolTracker()
        self._calls = InFlightCalls(create_executor, delete_executor, self.wake)
        self._outcomes = ResultHandler(self.tracker, reporter, self.metrics)
        self.last_success: datetime | None = None  # the last that ended well
        self._said: set[str] = set()
        self._stir = threading.Event()
        self._closing = threading.Event()

    def wake(self) -> None:
        self._stir.set()

    def close(self) -> None:
        self._closing.set()
        self._stir.set()

    def collect_results(self, timeout: float) -> None:
        """Take in the answers of calls that end within so many seconds. Not beside a round."""
        self._calls.wait(timeout)
        for answer in self._calls.take_results():
            self._outcomes.handle_call(answer, self._clock.now())

    def run(self) -> None:
        """Until closed."""
        wait = timedelta(0)
        while not self._closing.is_set():
            self._stir.wait(wait.total_seconds())
            self._stir.clear()
            if self._closing.is_set():
                return
            try:
                wait = self.reconcile() if self._leading() else self._settings.poll_interval
                self.metrics.count("tpu_provisioner_rounds_total", outcome="done")
            except Exception as error:
                wait = self._settings.poll_interval
                self.metrics.count("tpu_provisioner_rounds_total", outcome="failed")
                if isinstance(error, FleetError):
                    log.warning("a round failed: %s", error)
                else:
                    log.exception("a round failed; the next follows")
            self.metrics.gauge("tpu_provisioner_leading", {(): float(self._leading())})
            self._closing.wait(MIN_INTERVAL.total_seconds())

    def reconcile(self) -> timedelta:
        """Once over everything; how long until the next is due."""
        self.collect_results(timeout=0)
        now = self._clock.now()
        listed = self._pools.list_pools()
        troubled = any(pool.managed and pool.status in ERROR_STATUSES for pool in listed)
        failures = self._pools.failed_creates() if troubled or self.tracker.pending_creates else {}
        world = self._observe(listed, now)
        self._outcomes.handle_pools(world, failures, now)
        plan = plans.plan_pools(world, self.tracker.backoff, self._settings, now)
        self._act(plan, world, now)
        self._measure(world)
        self.last_success = now
        return self._next(plan, world, now)

    def _observe(self, listed: Sequence[ObservedPool], now: datetime) -> ClusterState:
        owners = self._cluster.owners()
        pods = self._cluster.pods()
        demands = observations.pool_demands(pods, owners, self._settings)
        nodes = [
            node for node in self._cluster.nodes()
            if (node["metadata"].get("labels") or {}).get(label_keys.MANAGER) == label_keys.MANAGER_NAME
        ]  # fmt: skip
        waited_for = {
            pool.name
            for demand in demands
            if demand.pool_spec is not None
            for pool in listed
            if pool.parent == (demand.pool_spec.namespace, demand.pool_spec.parent.name)
        }
        names = [pool.name for pool in listed]
        self.tracker.observe_owners(listed, owners, now)
        self.tracker.observe_waiting(listed, waited_for, now)
        used = observations.pool_users(pods, nodes, self._settings)
        self.tracker.observe_idle(listed, waited_for, used, now)
        self._teller.forget_except({demand.pod.uid for demand in demands})
        return ClusterState(
            pools=listed,
            owners=owners,
            demands=demands,
            youngest_node_at=observations.youngest_nodes(nodes),
            ready_nodes=observations.ready_nodes(nodes),
            users=used,
            idle_since=self.tracker.idle_since,
            owner_missing_since=self.tracker.owner_missing_since,
            not_serving_since=self.tracker.not_serving_since,
            deleting=self.tracker.deleting(now) | self._calls.deleting,
            creating=self.tracker.creating(names, self._calls.creating),
        )

    def _act(self, plan: PoolPlan, world: ClusterState, now: datetime) -> None:
        if self._settings.dry_run:
            self._say(plan)
            return
        for create in plan.creates:
            call = GkeCall(action=create, started_at=now, state=world)
            self._calls.start(call, functools.partial(self._create, create))
        for delete in plan.deletes:
            call = GkeCall(
                action=delete,
                started_at=now,
                state=world,
                node_name=self._node_of(delete.pool.name),
            )
            self._calls.start(call, functools.partial(self._delete, delete))
        for hold in plan.waiting:
            if hold.report:
                self._teller.report_on_pod(hold.pod, CREATE_FAILED, hold.reason)

    def _say(self, plan: PoolPlan) -> None:
        """In a dry run: what would be done, once for as long as it is the same."""
        said = set(plan.describe())
        for words in sorted(said - self._said):
            log.info("dry run: %s", words)
        self._said = said

    def _create(self, create: CreatePool) -> bool:
        self._pools.create(create.spec.create_request(create.location, create.pool_name))
        return True

    def _delete(self, delete: DeletePool) -> bool:
        if delete.orphan and not self._really_orphan(delete.pool):
            return False
        self._pools.delete(delete.pool.name)
        return True

    def _really_orphan(self, pool: ObservedPool) -> bool:
        assert pool.owner is not None
        found = self._cluster.fetch_owner(*pool.owner)
        uid = pool.labels.get(label_keys.OWNER_UID)
        return found is None or bool(uid and found.uid != uid)

    def _node_of(self, pool: str) -> str | None:
        for node in self._cluster.nodes():
            if (node["metadata"].get("labels") or {}).get(label_keys.NODE_POOL) == pool:
                return str(node["metadata"]["name"])
        return None

    def _measure(self, world: ClusterState) -> None:
        ours = [pool for pool in world.pools if pool.managed]
        states = Counter(pool.status for pool in ours)
        self.metrics.gauge(
            "tpu_provisioner_pools",
            {(("state", status.lower()),): states.get(status, 0) for status in PoolStatus},
        )
        self.metrics.gauge("tpu_provisioner_chips", {(): sum(pool.chips for pool in ours)})
        self.metrics.gauge("tpu_provisioner_waiting_pods", {(): len(world.demands)})

    def _next(self, plan: PoolPlan, world: ClusterState, now: datetime) -> timedelta:
        moving = self._calls or self.tracker.pending_creates or self.tracker.pending_deletes
        if moving or any(pool.managed and pool.status in TRANSITIONAL for pool in world.pools):
            return self._settings.poll_interval
        due = plan.recheck_at - now if plan.recheck_at is not None else IDLE_INTERVAL
        return min(max(due, MIN_INTERVAL), IDLE_INTERVAL)
