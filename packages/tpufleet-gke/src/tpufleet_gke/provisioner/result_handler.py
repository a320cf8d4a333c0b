"""Results of GKE calls and of pool creations: reported as events, counted and remembered."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from tpufleet.errors import Conflict, FleetError, PermissionMissing
from tpufleet_gke.provisioner.gke import failures
from tpufleet_gke.provisioner.gke.calls import GkeCall, GkeCallResult
from tpufleet_gke.provisioner.gke.node_pools import detail_of
from tpufleet_gke.provisioner.kube.pool_events import (
    CREATE_FAILED,
    CREATE_STARTED,
    CREATE_SUCCEEDED,
    DELETE_FAILED,
    DELETE_STARTED,
    DELETE_SUCCEEDED,
    POOL_NOT_FOUND,
    POOL_REUSED,
    EventReporter,
)
from tpufleet_gke.provisioner.metrics import ProvisionerMetrics
from tpufleet_gke.provisioner.model import pod_owners
from tpufleet_gke.provisioner.model.cluster_state import (
    ClusterState,
    FailureCause,
    ObservedPool,
    PoolFailure,
    PoolStatus,
)
from tpufleet_gke.provisioner.model.pool_shapes import PoolShape
from tpufleet_gke.provisioner.model.pool_specs import PoolSpec
from tpufleet_gke.provisioner.planning.pool_plan import CordonPool, CreatePool, DeletePool
from tpufleet_gke.provisioner.planning.pool_tracker import (
    ERROR_STATUSES,
    PendingCreate,
    PoolTracker,
)
from tpufleet_gke.provisioner.planning.request_backoff import SHARED_CAUSES, PoolKind
from tpufleet_gke.provisioner.planning.warm_pools import AdoptPool

log = logging.getLogger("tpufleet_gke.provisioner")


class ResultHandler:
    def __init__(
        self, tracker: PoolTracker, reporter: EventReporter, metrics: ProvisionerMetrics
    ) -> None:
        self._tracker, self._reporter, self._metrics = tracker, reporter, metrics

    def handle_call(self, result: GkeCallResult, now: datetime) -> None:
        error = result.error
        if error is not None and not isinstance(error, FleetError):
            log.error("unexpected error in a call for %s", result.call.pool_name, exc_info=error)
            error = FleetError(repr(error))
        if isinstance(result.call.action, CreatePool):
            self._handle_create(result.call, result.call.action, error, now)
        elif isinstance(result.call.action, AdoptPool):
            self._handle_adoption(result.call, result.call.action, error)
        elif isinstance(result.call.action, CordonPool):
            self._handle_cordon(result.call.action, error, now)
        elif result.sent:
            self._handle_delete(result.call, result.call.action, error, now)
        else:
            log.info("node pool %s is kept: a Job uses it", result.call.pool_name)
            self._tracker.keep(result.call.pool_name, now)

    def _handle_create(
        self, call: GkeCall, create: CreatePool, error: FleetError | None, now: datetime
    ) -> None:
        outcome = "started"
        if isinstance(error, Conflict):
            outcome = "exists"  # from an earlier call whose response was lost; it will be listed
        elif error is not None:
            failure = _with_policy_hint(create.spec.shape, _failure(error))
            self._count_failure(failure.cause)
            self._metrics.calls.labels(verb="create", outcome="refused").inc()
            self._back_off(create, failure, now)
            self._report_failed_create(create, failure)
            return
        else:
            message = f"node pool {create.pool_name} in {create.location}"
            self._reporter.report_on_pod(create.pod, CREATE_STARTED, message)
        self._tracker.pending_creates[create.pool_name] = PendingCreate(create, call.started_at)
        self._metrics.calls.labels(verb="create", outcome=outcome).inc()

    def _handle_adoption(self, call: GkeCall, adopt: AdoptPool, error: FleetError | None) -> None:
        name = adopt.pool.name
        if error is not None:
            # The pod gets a pool of its own, and this one is deleted when its time is over.
            log.warning("cannot reuse node pool %s: %s", name, error)
            self._tracker.unadoptable.add(name)
            self._metrics.calls.labels(verb="relabel", outcome="refused").inc()
            return
        self._tracker.pending_adoptions[name] = (adopt, call.started_at)
        self._metrics.calls.labels(verb="relabel", outcome="started").inc()
        previous = pod_owners.describe(adopt.pool.owner) if adopt.pool.owner else "another Job"
        message = f"node pool {name} in {adopt.pool.location}, which served {previous}"
        self._reporter.report_on_pod(adopt.pod, POOL_REUSED, message)

    def _handle_cordon(self, cordon: CordonPool, error: FleetError | None, now: datetime) -> None:
        name = cordon.pool.name
        if isinstance(error, PermissionMissing):
            if not self._tracker.can_cordon(now):
                return  # another pool was refused a moment ago
            self._tracker.deny_cordons(now)
            log.warning(
                "pools are deleted without a cordon, and a pod that is scheduled to one at that "
                "moment is lost: %s; grant the provisioner the verb patch on nodes",
                error,
            )
        elif error is not None:
            log.warning("cannot cordon the nodes of %s: %s", name, error)
            self._tracker.keep(name, now)

    def _handle_delete(
        self, call: GkeCall, delete: DeletePool, error: FleetError | None, now: datetime
    ) -> None:
        pool, state = delete.pool, call.state
        outcome = "started" if error is None else "refused"
        self._metrics.calls.labels(verb="delete", outcome=outcome).inc()
        if error is not None:
            failure = _failure(error)
            self._tracker.backoff.record_failed_deletion(pool.name, pool.status, failure, now)
            message = f"node pool {pool.name}: {error}"
            self._reporter.report_on_pool(
                pool, call.node_name, state, DELETE_FAILED, message, failure.detail
            )
            return
        self._tracker.backoff.clear_deletion(pool.name)
        owner = state.owners.get(pool.owner) if pool.owner else None
        if owner is not None and owner.ended_at is not None:
            elapsed = (call.started_at - owner.ended_at).total_seconds()
            self._metrics.deletion_seconds.observe(max(elapsed, 0))
        self._tracker.pending_deletes[pool.name] = (delete, call.started_at)
        if delete.misfit is not None:
            self.handle_misfit(delete.misfit, delete.reason, now)
        message = f"node pool {pool.name}: {delete.reason}"
        self._reporter.report_on_pool(pool, call.node_name, state, DELETE_STARTED, message)
        if delete.orphan and call.node_name is None and pool.status is PoolStatus.RUNNING:
            message = f"node pool {pool.name} had no nodes"
            self._reporter.report_on_pool(pool, None, state, POOL_NOT_FOUND, message)

    def handle_misfit(self, spec: PoolSpec, reason: str, now: datetime) -> None:
        """A pool came up, and the pod that it was for does not fit it."""
        failure = PoolFailure(FailureCause.POD_MISFIT, reason)
        self._tracker.backoff.record_pool_failure(spec, failure, now)
        self._count_failure(failure.cause)

    def handle_pools(
        self, state: ClusterState, failures: Mapping[str, PoolFailure], now: datetime
    ) -> None:
        """Report creations and deletions that have finished since the last call."""
        pools = {pool.name: pool for pool in state.pools}
        for counted in self._tracker.observe_failures(state.pools, failures, now):
            self._count_failure(counted.cause)
        for pending, created, failure in self._tracker.take_finished_creates(pools, failures, now):
            self._handle_finished_create(pending, created, failure, now)
        for delete in self._tracker.take_finished_deletes(pools):
            usage = self._tracker.bill.usage(delete.pool.name)
            message = f"node pool {delete.pool.name}" + (f": {usage}" if usage else "")
            self._reporter.report_on_pool(delete.pool, None, state, DELETE_SUCCEEDED, message)

        self._tracker.bill.forget_except(pools)

    def _handle_finished_create(
        self,
        pending: PendingCreate,
        pool: ObservedPool | None,
        failure: PoolFailure | None,
        now: datetime,
    ) -> None:
        create = pending.create
        if pool is not None and pool.status not in ERROR_STATUSES:
            self._tracker.backoff.clear_location(create.location, create.spec)
            elapsed = (now - pending.requested_at).total_seconds()
            self._metrics.provisioning_seconds.observe(elapsed)
            message = f"node pool {create.pool_name} in {create.location}"
            self._reporter.report_on_pod(create.pod, CREATE_SUCCEEDED, message)
            return
        failure = failure or PoolFailure(FailureCause.TRANSIENT, "GKE never listed it")
        failure = _with_policy_hint(create.spec.shape, failure)
        if pool is None:
            self._back_off(create, failure, now)
        self._report_failed_create(create, failure)

    def _report_failed_create(self, create: CreatePool, failure: PoolFailure) -> None:
        message = f"node pool {create.pool_name} in {create.location}: {failure.message}"
        self._reporter.report_on_pod(
            create.pod, CREATE_FAILED, message, failure.cause, failure.detail
        )

    def _back_off(self, create: CreatePool, failure: PoolFailure, now: datetime) -> None:
        backoff = self._tracker.backoff
        if failure.cause in SHARED_CAUSES:
            kind = PoolKind.of_spec(create.spec)
            backoff.record_location_failure(create.location, kind, failure, now)
        else:
            backoff.record_pool_failure(create.spec, failure, now)

    def _count_failure(self, cause: FailureCause) -> None:
        self._metrics.pool_failures.labels(trouble=cause.value).inc()


def _failure(error: FleetError) -> PoolFailure:
    return failures.failure_of(failures.classify_error(error), detail_of(error), str(error))


def _with_policy_hint(shape: PoolShape, failure: PoolFailure) -> PoolFailure:
    """For no known reason, a pool of this accelerator most often lacks its workload policy."""
    policy = (shape.placement or {}).get("policyName")
    rejected = failure.cause is FailureCause.INVALID_REQUEST
    if policy is None or not rejected or not failure.unknown:
        return failure
    hint = f"is the workload policy {policy} missing? {failures.MAKE_POLICIES}"
    return replace(failure, message=f"{failure.message}; {hint}")
