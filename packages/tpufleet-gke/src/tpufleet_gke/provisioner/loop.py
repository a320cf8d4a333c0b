"""The provisioner's reconcile loop: observe, plan, act. Only the leading replica acts."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any, TypeVar

from tpufleet.clocks import Clock
from tpufleet.errors import FleetError, PermissionMissing, ProviderUnavailable
from tpufleet_gke.provisioner.gke.auto_provisioning import AutoProvisioningLimits
from tpufleet_gke.provisioner.gke.background_read import BackgroundRead
from tpufleet_gke.provisioner.gke.calls import GkeCall, InFlightCalls, PoolAction
from tpufleet_gke.provisioner.gke.node_pools import NodePools
from tpufleet_gke.provisioner.gke.pool_listing import PoolListing
from tpufleet_gke.provisioner.kube import observations
from tpufleet_gke.provisioner.kube.pool_events import CREATE_FAILED, LEFT_TO_GKE, EventReporter
from tpufleet_gke.provisioner.kube.watched_cluster import WatchedCluster
from tpufleet_gke.provisioner.metrics import ProvisionerMetrics
from tpufleet_gke.provisioner.model import label_keys, pod_owners, pods
from tpufleet_gke.provisioner.model.cluster_state import (
    ClusterState,
    ObservedPool,
    PoolFailure,
    PoolStatus,
)
from tpufleet_gke.provisioner.model.pods import Json
from tpufleet_gke.provisioner.planning import planner, pool_lifetime
from tpufleet_gke.provisioner.planning.pool_plan import CordonPool, CreatePool, DeletePool, PoolPlan
from tpufleet_gke.provisioner.planning.pool_tracker import PoolTracker
from tpufleet_gke.provisioner.planning.warm_pools import AdoptPool
from tpufleet_gke.provisioner.result_handler import ResultHandler
from tpufleet_gke.provisioner.settings import ProvisionerSettings
from tpufleet_gke.provisioner.slice_reconciler import SliceReconciler
from tpufleet_gke.provisioner.steady_clock import SteadyClock

log = logging.getLogger("tpufleet_gke.provisioner")
T = TypeVar("T")

IDLE_INTERVAL = timedelta(seconds=60)  # the latest that an orphan is noticed
MIN_INTERVAL = timedelta(milliseconds=250)  # watch events come in bursts
LIST_TIMEOUT = timedelta(seconds=5)  # how long a round waits for a list of pools
NODES_PER_WORKER, MAX_NODE_CALLS = 8, 16  # calls for nodes of one pool at a time
TRANSITIONAL = (PoolStatus.PROVISIONING, PoolStatus.RECONCILING, PoolStatus.STOPPING)


class Provisioner:
    def __init__(
        self,
        cluster: WatchedCluster,
        pools: NodePools,
        settings: ProvisionerSettings,
        *,
        clock: Clock,
        reporter: EventReporter,
        create_executor: Executor,
        delete_executor: Executor,
        metrics: ProvisionerMetrics | None = None,
        is_leader: Callable[[], bool] = lambda: True,
        list_timeout: timedelta = LIST_TIMEOUT,
        dry_run: bool = False,
    ) -> None:
        self._cluster, self._pools, self._settings = cluster, pools, settings
        self._dry_run = dry_run
        self._clock, self._reporter, self._is_leader = clock, reporter, is_leader
        self.metrics = metrics or ProvisionerMetrics()
        self.tracker = PoolTracker()
        self._delete_executor = delete_executor
        self._calls = InFlightCalls(create_executor, delete_executor, self.wake)
        self._listing = PoolListing(pools.list_pools, list_timeout)
        self._auto_provisioning = AutoProvisioningLimits(pools.auto_provisioned, list_timeout)
        self._failed_creates = BackgroundRead(
            pools.failed_creates, "operations", list_timeout, timedelta(0)
        )
        self._slices = SliceReconciler(cluster, reporter, delete_executor, settings.pod_resource)
        self._steady = SteadyClock(clock)
        self._results = ResultHandler(self.tracker, reporter, self.metrics)
        self.last_success = clock.uptime()  # of a reconciliation; at first: creation
        self._logged_plan: set[str] = set()
        self._saved_misfits: dict[str, Any] | None = None  # None: not read as the leader yet
        self._saving: Future[dict[str, Any] | None] | None = None
        self._save_error = ""  # as logged
        self._wake = threading.Event()
        self._closing = threading.Event()

    def wake(self) -> None:
        self._wake.set()

    def close(self) -> None:
        self._closing.set()
        self._wake.set()

    def collect_results(self, timeout: float) -> None:
        """Handle calls that end within `timeout` seconds. Not safe while `reconcile` runs."""
        self._calls.wait(timeout)
        for result in self._calls.take_results():
            self._results.handle_call(result, self._steady.now())

    def run(self) -> None:
        """Reconcile until closed."""
        with contextlib.ExitStack() as reads:
            for read in (self._listing, self._auto_provisioning, self._failed_creates):
                reads.callback(read.close)
            self._reconcile_until_closed()

    def _reconcile_until_closed(self) -> None:
        wait = timedelta(0)
        while not self._closing.is_set():
            self._wake.wait(wait.total_seconds())
            self._wake.clear()
            if self._closing.is_set():
                return
            try:
                wait = self._settings.poll_interval
                if self._is_leader():
                    wait = self.reconcile()
                else:
                    self._saved_misfits = None
                self.metrics.rounds.labels(outcome="done").inc()
            except Exception as error:
                wait = self._settings.poll_interval
                self.metrics.rounds.labels(outcome="failed").inc()
                unexpected = None if isinstance(error, FleetError) else error
                log.warning("reconciling failed: %s", error, exc_info=unexpected)
            self.metrics.leading.set(self._is_leader())
            self._closing.wait(MIN_INTERVAL.total_seconds())

    def reconcile(self) -> timedelta:
        """One pass over all pools and pods. Returns how long to wait before the next."""
        self.collect_results(timeout=0)
        stale = self._cluster.stale()
        if stale is not None:
            raise ProviderUnavailable(f"not reconciling: {stale}")
        now = self._steady.now()
        if self._saved_misfits is None:
            self._restore_misfits()
        pools = self._listing.fetch()
        failures = self._read_failures(pools, now)
        state = self._observe(pools, now)
        self._results.handle_pools(state, failures, now)
        plan = planner.plan_pools(state, self.tracker.backoff, self._settings, now)
        self._act(plan, state, now)
        self._save_misfits()
        self._update_metrics(state, now)
        self.last_success = self._clock.uptime()
        return self._next_wait(plan, state, now)

    def _restore_misfits(self) -> None:
        try:
            self.tracker.backoff.restore_misfits(self._cluster.load_misfits())
        except (PermissionMissing, ValueError, TypeError) as error:
            _log_misfits("read", error)
        self._saved_misfits = self.tracker.backoff.misfits

    def _save_misfits(self) -> None:
        """One save at a time, so that none overtakes another, and again after one that failed."""
        if self._saving is not None:
            if not self._saving.done():
                return
            done, self._saving = self._saving, None
            saved = done.result()
            self._saved_misfits = self._saved_misfits if saved is None else saved
        misfits = self.tracker.backoff.misfits
        if misfits == self._saved_misfits or self._dry_run:
            return

        def save() -> dict[str, Any] | None:
            try:
                self._cluster.save_misfits(misfits)
            except FleetError as error:
                if str(error) != self._save_error:
                    _log_misfits("save", error)
                self._save_error = str(error)
                return None
            self._save_error = ""
            return misfits

        self._saving = self._delete_executor.submit(save)

    def _read_failures(
        self, pools: Sequence[ObservedPool], now: datetime
    ) -> Mapping[str, PoolFailure]:
        """What GKE says of creations that failed. Nothing when it does not say so at once: then
        what the pools themselves show has to do."""
        has_errors = any(pool.managed and pool.failure is not None for pool in pools)
        if not has_errors and not self.tracker.pending_creates:
            return {}
        fresh = self._failed_creates.update(now, wait_for_it=True)
        return self._failed_creates.value or {} if fresh else {}

    def _observe(self, pools: Sequence[ObservedPool], now: datetime) -> ClusterState:
        owners = self._cluster.owners()
        owned = observations.owned_pods(self._cluster.pods(), self._settings)
        auto_provisioned = (
            self._auto_provisioning.accelerators(now)
            if self._settings.respect_auto_provisioning
            else frozenset()
        )
        demands = observations.pool_demands(owned, owners, self._settings, auto_provisioned or ())
        nodes = [node for node in self._cluster.nodes() if _is_managed(node)]
        parents = {
            (demand.pool_spec.namespace, demand.pool_spec.parent.name)
            for demand in demands
            if demand.pool_spec is not None
        }
        demanded = {pool.name for pool in pools if pool.parent in parents}
        cordoned_since, cordoned = observations.cordoned_pools(nodes)
        stranded = observations.stranded_pods(owned, self._settings)
        for_slices: set[str] = set()
        if self._settings.dynamic_slices:
            for_slices = self._slices.reconcile(owned, owners, now, dry_run=self._dry_run)
        waiting_uids = {waiting.pod.uid for waiting in (*demands, *stranded)}
        self._reporter.forget_except(waiting_uids | for_slices)
        state = ClusterState(
            pools=pools,
            owners=owners,
            demands=demands,
            stranded=stranded,
            youngest_node_at=observations.youngest_nodes(nodes),
            ready_nodes=observations.ready_nodes(nodes),
            ready_chips=observations.ready_chips(nodes, self._settings.pod_resource),
            users=observations.pool_users(owned, nodes),
            placed_jobs=observations.placed_jobs(owned),
            completed_jobs=self._cluster.completed_jobs(),
            cordoned_since=cordoned_since,
            cordoned=cordoned,
            knows_auto_provisioning=auto_provisioned is not None,
        )
        calls = self._calls
        return self.tracker.observe(
            state, demanded, now,
            creating=calls.creating, adopting=calls.adopting, deleting=calls.deleting,
        )  # fmt: skip

    def _act(self, plan: PoolPlan, state: ClusterState, now: datetime) -> None:
        if self._dry_run:
            self._log_plan(plan)
            return
        for create in plan.creates:
            self._start(create, state, now, functools.partial(self._create, create))
        for adopt in plan.adoptions:
            self._start(adopt, state, now, functools.partial(self._adopt, adopt))
        for cordon in plan.cordons:
            self._start(cordon, state, now, functools.partial(self._cordon, cordon))
            self.tracker.cordon_reasons[cordon.pool.name] = cordon.reason
        for delete in plan.deletes:
            node_name = next(iter(self._nodes_of(delete.pool.name)), None)
            self._start(delete, state, now, functools.partial(self._delete, delete), node_name)
        for misfit in plan.misfits:
            self._results.handle_misfit(misfit.spec, misfit.reason, now)
        for waiting in plan.waiting:
            if waiting.report:
                reason = LEFT_TO_GKE if waiting.left_to_gke else CREATE_FAILED
                self._reporter.report_on_pod(
                    waiting.pod, reason, waiting.reason, waiting.cause, waiting.detail
                )

    def _start(
        self,
        action: PoolAction,
        state: ClusterState,
        now: datetime,
        send: Callable[[], bool],
        node_name: str | None = None,
    ) -> None:
        call = GkeCall(action=action, started_at=now, state=state, node_name=node_name)
        self._calls.start(call, send)

    def _log_plan(self, plan: PoolPlan) -> None:
        """Log what a dry run would do, once for as long as it stays the same."""
        lines = set(plan.describe())
        for line in sorted(lines - self._logged_plan):
            log.info("dry run: %s", line)
        self._logged_plan = lines

    def _create(self, create: CreatePool) -> bool:
        self._pools.create(create.spec.create_request(create.location, create.pool_name))
        return True

    def _adopt(self, adopt: AdoptPool) -> bool:
        self._pools.relabel(adopt.pool.name, adopt.labels)
        return True

    def _delete(self, delete: DeletePool) -> bool:
        if delete.orphan and not self._owner_is_gone(delete.pool):
            return False
        if not delete.evict and self._has_users(delete.pool):
            return False
        self._pools.delete(delete.pool.name)
        return True

    def _cordon(self, cordon: CordonPool) -> bool:
        self._for_nodes(
            cordon.pool.name,
            lambda name: self._cluster.set_cordon(name, None if cordon.lift else self._clock.now()),
        )
        return True

    def _has_users(self, pool: ObservedPool) -> bool:
        """Whether any pod uses its chips. Only leaders are watched, and a watch may lag, so the API
        server is asked."""
        resource = self._settings.pod_resource
        return any(
            pods.uses(pod, resource) and not self._is_over(pod)
            for on_node in self._for_nodes(pool.name, self._cluster.pods_on)
            for pod in on_node
        )

    def _for_nodes(self, pool: str, call: Callable[[str], T]) -> list[T]:
        """One result for each node of a pool. Large slices have hundreds of nodes."""
        names = self._nodes_of(pool)
        workers = min(1 + len(names) // NODES_PER_WORKER, MAX_NODE_CALLS)
        with ThreadPoolExecutor(workers, thread_name_prefix="nodes") as executor:
            return list(executor.map(call, names))

    def _is_over(self, pod: Json) -> bool:
        """Whether its Job has ended or is suspended, so that the pod is about to be deleted."""
        owner = pod_owners.owner_of_pod(pod, self._settings.served_kinds)
        if owner is None:
            return False
        found = self._cluster.fetch_owner(pod["metadata"]["namespace"], owner.name)
        return not pool_lifetime.is_active(found)

    def _owner_is_gone(self, pool: ObservedPool) -> bool:
        assert pool.owner is not None
        owner = self._cluster.fetch_owner(*pool.owner)
        uid = pool.labels.get(label_keys.OWNER_UID)
        return owner is None or bool(uid and owner.uid != uid)

    def _nodes_of(self, pool: str) -> list[str]:
        nodes = self._cluster.nodes()
        return [
            str(node["metadata"]["name"]) for node in nodes if observations.pool_of(node) == pool
        ]

    def _update_metrics(self, state: ClusterState, now: datetime) -> None:
        self.metrics.charge(self.tracker.bill.charge(state, self._settings, now), now)
        oldest = min((demand.since for demand in state.demands), default=now)
        self.metrics.oldest_wait.set(max((now - oldest).total_seconds(), 0))
        managed = [pool for pool in state.pools if pool.managed]
        statuses = Counter(pool.status for pool in managed)
        for status in PoolStatus:
            self.metrics.pools.labels(state=status.lower()).set(statuses[status])
        self.metrics.chips.set(sum(pool.chips for pool in managed))
        self.metrics.waiting_pods.set(len(state.demands))

    def _next_wait(self, plan: PoolPlan, state: ClusterState, now: datetime) -> timedelta:
        tracker = self.tracker
        pending = (
            self._calls
            or tracker.pending_creates
            or tracker.pending_deletes
            or tracker.pending_adoptions
        )
        if pending or any(pool.managed and pool.status in TRANSITIONAL for pool in state.pools):
            longest = self._settings.poll_interval
        else:
            longest = IDLE_INTERVAL
        wait = plan.recheck_at - now if plan.recheck_at is not None else longest
        return min(max(wait, MIN_INTERVAL), longest)


def _is_managed(node: Json) -> bool:
    labels = node["metadata"].get("labels") or {}
    return bool(labels.get(label_keys.MANAGER) == label_keys.MANAGER_NAME)


def _log_misfits(verb: str, error: Exception) -> None:
    log.warning("cannot %s which pods fit no pool: %s", verb, error)
