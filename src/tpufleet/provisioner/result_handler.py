"""What came of calls to GKE and of the pools they were about: told, counted and remembered."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime

from tpufleet.errors import Conflict, FleetError
from tpufleet.provisioner.gke_api import failure_causes, pool_shapes
from tpufleet.provisioner.gke_api.calls import GkeCall, GkeCallResult
from tpufleet.provisioner.gke_api.node_pools import OperationFailure
from tpufleet.provisioner.kube.pool_events import (
    CREATE_FAILED,
    CREATE_STARTED,
    CREATE_SUCCEEDED,
    DELETE_FAILED,
    DELETE_STARTED,
    DELETE_SUCCEEDED,
    POOL_NOT_FOUND,
    EventReporter,
)
from tpufleet.provisioner.metrics import Metrics
from tpufleet.provisioner.planning.cluster_state import (
    ClusterState,
    FailureCause,
    ObservedPool,
    PoolStatus,
)
from tpufleet.provisioner.planning.plans import CreatePool, DeletePool
from tpufleet.provisioner.planning.pool_tracker import ERROR_STATUSES, PendingCreate, PoolTracker

log = logging.getLogger("tpufleet.provisioner")


class ResultHandler:
    def __init__(self, tracks: PoolTracker, teller: EventReporter, metrics: Metrics) -> None:
        self._tracks, self._teller, self._metrics = tracks, teller, metrics

    # Of calls.

    def handle_call(self, answer: GkeCallResult, now: datetime) -> None:
        error = answer.error
        if error is not None and not isinstance(error, FleetError):
            log.error("a call about %s failed", answer.call.pool_name, exc_info=error)
            error = FleetError(f"it failed unexpectedly: {error!r}")
        if isinstance(answer.call.action, CreatePool):
            self._creation(answer.call, answer.call.action, error, now)
        elif answer.sent:
            self._deletion(answer.call, answer.call.action, error)

    def _creation(
        self, call: GkeCall, create: CreatePool, error: FleetError | None, now: datetime
    ) -> None:
        outcome = "started"
        if isinstance(error, Conflict):
            outcome = "exists"  # made by an earlier call whose answer was lost; the listing has it
        elif error is not None:
            trouble, words = (
                failure_causes.classify_error(error),
                pool_shapes.add_policy_hint(create.spec.shape, str(error)),
            )
            self._refuse(create, trouble, words, now)
            self._count_failure(trouble)
            self._metrics.count("tpu_provisioner_calls_total", verb="create", outcome="refused")
            self._teller.report_on_pod(
                create.pod, CREATE_FAILED, f"node pool {create.pool_name}: {words}"
            )
            return
        else:
            words = f"node pool {create.pool_name} in {create.location}"
            self._teller.report_on_pod(create.pod, CREATE_STARTED, words)
        self._tracks.pending_creates[create.pool_name] = PendingCreate(create, call.started_at)
        self._metrics.count("tpu_provisioner_calls_total", verb="create", outcome=outcome)

    def _deletion(self, call: GkeCall, delete: DeletePool, error: FleetError | None) -> None:
        pool, world = delete.pool, call.state
        outcome = "started" if error is None else "refused"
        self._metrics.count("tpu_provisioner_calls_total", verb="delete", outcome=outcome)
        if error is not None:
            words = f"{pool.name}: {error}"
            self._teller.report_on_pool(pool, call.node_name, world, DELETE_FAILED, words)
            return
        owner = world.owners.get(pool.owner) if pool.owner else None
        if owner is not None and owner.ended_at is not None:
            spent = (call.started_at - owner.ended_at).total_seconds()
            self._metrics.observe("tpu_provisioner_deletion_seconds", max(spent, 0))
        self._tracks.pending_deletes[pool.name] = (delete, call.started_at)
        words = f"node pool {pool.name}: {delete.reason}"
        self._teller.report_on_pool(pool, call.node_name, world, DELETE_STARTED, words)
        if delete.orphan and call.node_name is None and pool.status is PoolStatus.RUNNING:
            self._teller.report_on_pool(
                pool, None, world, POOL_NOT_FOUND, f"{pool.name} had no nodes"
            )

    # Of pools.

    def handle_pools(
        self, world: ClusterState, failures: Mapping[str, OperationFailure], now: datetime
    ) -> None:
        """Creations and deletions that came to their end."""
        by_name = {pool.name: pool for pool in world.pools}
        for pool in self._tracks.observe_failures(world.pools, failures, now):
            failure = failures.get(pool.name)
            trouble = failure.cause if failure else pool.failure_cause or FailureCause.TRANSIENT
            self._count_failure(trouble)
        for asked, found, failure in self._tracks.take_finished_creates(by_name, failures, now):
            self._created(asked, found, failure, now)
        for delete in self._tracks.take_finished_deletes(by_name):
            words = f"node pool {delete.pool.name} is gone"
            self._teller.report_on_pool(delete.pool, None, world, DELETE_SUCCEEDED, words)

    def _created(
        self,
        asked: PendingCreate,
        pool: ObservedPool | None,
        failure: OperationFailure | None,
        now: datetime,
    ) -> None:
        create = asked.create
        if pool is not None and pool.status not in ERROR_STATUSES:
            self._tracks.backoff.clear_location(create.location, pool.machine_type, pool.nodes)
            spent = (now - asked.requested_at).total_seconds()
            self._metrics.observe("tpu_provisioner_provisioning_seconds", spent)
            words = f"node pool {create.pool_name} runs in {create.location}"
            self._teller.report_on_pod(create.pod, CREATE_SUCCEEDED, words)
            return
        words = (
            failure.message if failure else pool.message if pool else ""
        ) or "it never appeared"
        words = pool_shapes.add_policy_hint(create.spec.shape, words)
        told = f"node pool {create.pool_name} in {create.location}: {words}"
        if pool is None:
            trouble = failure.cause if failure else FailureCause.TRANSIENT
            self._refuse(create, trouble, words, now)
        self._teller.report_on_pod(create.pod, CREATE_FAILED, told)

    def _refuse(self, create: CreatePool, trouble: FailureCause, words: str, now: datetime) -> None:
        if trouble in (FailureCause.OUT_OF_STOCK, FailureCause.QUOTA):
            shape = create.spec.shape
            self._tracks.backoff.record_location_failure(
                create.location,
                shape.machine_type,
                shape.nodes,
                cause=trouble,
                message=words,
                now=now,
            )
        else:
            self._tracks.backoff.record_pool_failure(create.spec, trouble, words, now)

    def _count_failure(self, trouble: FailureCause) -> None:
        self._metrics.count("tpu_provisioner_pool_failures_total", trouble=trouble.name.lower())
