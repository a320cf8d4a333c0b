"""What came of calls to GKE and of the pools they were about: told, counted and remembered."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime

from tpufleet.errors import Conflict, FleetError
from tpufleet.provisioner import shapes, troubles
from tpufleet.provisioner.calls import Answer, Call
from tpufleet.provisioner.gke import Failure
from tpufleet.provisioner.metrics import Metrics
from tpufleet.provisioner.plans import Create, Delete
from tpufleet.provisioner.seen import Pool, PoolStatus, Trouble, World
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


class Outcomes:
    def __init__(self, tracks: Tracks, teller: Teller, metrics: Metrics) -> None:
        self._tracks, self._teller, self._metrics = tracks, teller, metrics

    # Of calls.

    def take(self, answer: Answer, now: datetime) -> None:
        error = answer.error
        if error is not None and not isinstance(error, FleetError):
            log.error("a call about %s failed", answer.call.pool, exc_info=error)
            error = FleetError(f"it failed unexpectedly: {error!r}")
        if isinstance(answer.call.what, Create):
            self._creation(answer.call, answer.call.what, error, now)
        elif answer.made:
            self._deletion(answer.call, answer.call.what, error)

    def _creation(
        self, call: Call, create: Create, error: FleetError | None, now: datetime
    ) -> None:
        outcome = "started"
        if isinstance(error, Conflict):
            outcome = "exists"  # made by an earlier call whose answer was lost; the listing has it
        elif error is not None:
            trouble, words = troubles.of_error(error), shapes.told(create.wanted.shape, str(error))
            self._refuse(create, trouble, words, now)
            self._count_failure(trouble)
            self._metrics.count("tpu_provisioner_calls_total", verb="create", outcome="refused")
            self._teller.on_pod(create.pod, CREATION_FAILED, f"node pool {create.name}: {words}")
            return
        else:
            words = f"node pool {create.name} in {create.place}"
            self._teller.on_pod(create.pod, CREATION_STARTED, words)
        self._tracks.asked[create.name] = Asked(create, call.at)
        self._metrics.count("tpu_provisioner_calls_total", verb="create", outcome=outcome)

    def _deletion(self, call: Call, delete: Delete, error: FleetError | None) -> None:
        pool, world = delete.pool, call.world
        outcome = "started" if error is None else "refused"
        self._metrics.count("tpu_provisioner_calls_total", verb="delete", outcome=outcome)
        if error is not None:
            words = f"{pool.name}: {error}"
            self._teller.on_pool(pool, call.node, world, DELETION_FAILED, words)
            return
        owner = world.owners.get(pool.owner) if pool.owner else None
        if owner is not None and owner.ended_at is not None:
            spent = (call.at - owner.ended_at).total_seconds()
            self._metrics.observe("tpu_provisioner_deletion_seconds", max(spent, 0))
        self._tracks.deleted[pool.name] = (delete, call.at)
        words = f"node pool {pool.name}: {delete.because}"
        self._teller.on_pool(pool, call.node, world, DELETION_STARTED, words)
        if delete.orphan and call.node is None and pool.status is PoolStatus.RUNNING:
            self._teller.on_pool(pool, None, world, NOT_FOUND, f"{pool.name} had no nodes")

    # Of pools.

    def see(self, world: World, failures: Mapping[str, Failure], now: datetime) -> None:
        """Creations and deletions that came to their end."""
        by_name = {pool.name: pool for pool in world.pools}
        for pool in self._tracks.see_troubles(world.pools, failures, now):
            failure = failures.get(pool.name)
            trouble = failure.trouble if failure else pool.trouble or Trouble.PASSING
            self._count_failure(trouble)
        for asked, found, failure in self._tracks.settle(by_name, failures, now):
            self._created(asked, found, failure, now)
        for delete in self._tracks.gone(by_name):
            words = f"node pool {delete.pool.name} is gone"
            self._teller.on_pool(delete.pool, None, world, DELETION_SUCCEEDED, words)

    def _created(
        self, asked: Asked, pool: Pool | None, failure: Failure | None, now: datetime
    ) -> None:
        create = asked.create
        if pool is not None and pool.status not in UNWELL:
            self._tracks.refusals.granted(create.place, pool.machine_type, pool.nodes)
            spent = (now - asked.at).total_seconds()
            self._metrics.observe("tpu_provisioner_provisioning_seconds", spent)
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

    def _refuse(self, create: Create, trouble: Trouble, words: str, now: datetime) -> None:
        if trouble in (Trouble.STOCK, Trouble.QUOTA):
            shape = create.wanted.shape
            self._tracks.refusals.refuse_place(
                create.place, shape.machine_type, shape.nodes, trouble=trouble, words=words, now=now
            )
        else:
            self._tracks.refusals.refuse_pool(create.wanted, trouble, words, now)

    def _count_failure(self, trouble: Trouble) -> None:
        self._metrics.count("tpu_provisioner_pool_failures_total", trouble=trouble.name.lower())
