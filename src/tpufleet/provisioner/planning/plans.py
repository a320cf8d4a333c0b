"""What to do about node pools, worked out from what is wanted and what is there. Pure.

Nothing is remembered between two plans but refusals; a provisioner that died loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tpufleet.provisioner.gke_api import pool_hashes
from tpufleet.provisioner.gke_api.pool_specs import PoolCapacity, PoolLocation, PoolSpec
from tpufleet.provisioner.kube import label_keys
from tpufleet.provisioner.planning import budgets, pool_lifetime
from tpufleet.provisioner.planning.cluster_state import (
    ClusterState,
    FailureCause,
    ObservedPool,
    PendingPool,
    PodRef,
    PoolDemand,
    PoolStatus,
)
from tpufleet.provisioner.planning.request_backoff import RequestBackoff
from tpufleet.provisioner.settings import ProvisionerSettings

# A pool that is up, and still does not serve the pod that waits for it, is made anew.
NOT_SERVING_TIMEOUT = timedelta(minutes=10)
# A pool whose nodes are all ready, while its pod still waits, serves somebody else: pods go where
# the scheduler sends them, unless the admission webhook ties each Job to its own pool.
OCCUPIED_AFTER = timedelta(seconds=15)
# Errors that pass are given this long before a pool in use is given up.
ERROR_GRACE = timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True, slots=True)
class CreatePool:
    spec: PoolSpec
    location: PoolLocation
    pool_name: str
    pod: PodRef

    @property
    def pending_pool(self) -> PendingPool:
        return PendingPool(self.spec.namespace, self.spec.shape.chips)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletePool:
    pool: ObservedPool
    reason: str
    orphan: bool = False  # nobody is left to tell
    recreate: bool = False  # a pod waits for its successor


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingPod:
    """A pod that waits, and why."""

    pod: PodRef
    reason: str
    report: bool = False  # worth an event: somebody has to do something, or there is no stock
    until: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    creates: tuple[CreatePool, ...] = ()
    deletes: tuple[DeletePool, ...] = ()
    waiting: tuple[WaitingPod, ...] = ()
    recheck_at: datetime | None = None  # when time alone may change the answer

    def describe(self) -> Iterator[str]:
        """What it comes to, for people."""
        for create in self.creates:
            shape, pod = create.spec.shape, create.pod
            yield (
                f"would create {create.pool_name}, {shape.nodes} × {shape.machine_type} in "
                f"{create.location}, for pod {pod.namespace}/{pod.name}"
            )
        for delete in self.deletes:
            yield f"would delete {delete.pool.name}: {delete.reason}"
        for hold in self.waiting:
            yield f"pod {hold.pod.namespace}/{hold.pod.name} waits: {hold.reason}"


@dataclass(slots=True)
class _Draft:
    creates: list[CreatePool] = field(default_factory=list)
    deletes: dict[str, DeletePool] = field(default_factory=dict)
    holds: list[WaitingPod] = field(default_factory=list)
    moments: list[datetime] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)  # pools made for others, for pods that wait

    def delete(
        self, pool: ObservedPool, because: str, *, orphan: bool = False, recreate: bool = False
    ):
        self.deletes.setdefault(
            pool.name, DeletePool(pool=pool, reason=because, orphan=orphan, recreate=recreate)
        )

    def hold(self, demand: PoolDemand, because: str, *, failed: bool = False,
             until: datetime | None = None) -> None:  # fmt: skip
        self.holds.append(WaitingPod(pod=demand.pod, reason=because, report=failed, until=until))
        if until is not None:
            self.moments.append(until)


def plan_pools(
    world: ClusterState, refusals: RequestBackoff, given: ProvisionerSettings, now: datetime
) -> PoolPlan:
    draft = _Draft()
    for pool in world.pools:
        if pool.managed and not _on_its_way_out(pool, world):
            _judge_owner(pool, world, given, now, draft)
    for demand in sorted(world.demands, key=lambda one: (one.since, one.pod.uid)):
        _serve(demand, world, refusals, given, now, draft)
    return PoolPlan(
        creates=tuple(draft.creates),
        deletes=tuple(draft.deletes.values()),
        waiting=tuple(draft.holds),
        recheck_at=min((moment for moment in draft.moments if moment > now), default=None),
    )


def _on_its_way_out(pool: ObservedPool, world: ClusterState) -> bool:
    return pool.status is PoolStatus.STOPPING or pool.name in world.deleting


def _judge_owner(
    pool: ObservedPool,
    world: ClusterState,
    given: ProvisionerSettings,
    now: datetime,
    draft: _Draft,
) -> None:
    """A pool lives as long as its JobSet needs it, and no longer."""
    if pool.owner is None:
        return  # labelled by hand: not ours to judge
    owner = world.owners.get(pool.owner)
    because, since = pool_lifetime.unneeded_reason(pool, owner, world, given)
    if because is None or pool_lifetime.active_users(pool, world):
        return
    due = max(
        since + given.deletion_delay,
        world.youngest_node_at.get(pool.name, since) + given.node_min_lifespan
        if pool.name in world.youngest_node_at else since,
    )  # fmt: skip
    if due > now:
        draft.moments.append(due)
        return
    draft.delete(pool, because, orphan=owner is None)


def _serve(
    demand: PoolDemand,
    world: ClusterState,
    refusals: RequestBackoff,
    given: ProvisionerSettings,
    now: datetime,
    draft: _Draft,
) -> None:
    wanted = demand.pool_spec
    if wanted is None:
        draft.hold(demand, demand.rejection, failed=True)
        return
    if not pool_lifetime.is_active(world.owners.get((wanted.namespace, wanted.owner_name))):
        return  # its pod is about to go
    existing = _pools_of(wanted, world)
    serving = next((pool for pool in existing if not _full(pool, wanted, world, now)), None)
    if serving is not None:
        _follow(serving, demand, wanted, world, now, draft)
        return
    if any(create.spec.parent == wanted.parent and create.spec.namespace == wanted.namespace
           for create in draft.creates):  # fmt: skip
        return  # a second pod of the same Job: one pool serves both
    if existing and _gets_a_spare(demand, wanted, world, now, draft):
        return
    name = _free_name(wanted, existing, world)
    if name is None:
        words = f"{len(existing)} pools were made for it, and it runs on none; where others run on "
        draft.hold(demand, words + "them, the admission webhook would keep them off", failed=True)
        return
    if name in world.creating:
        return draft.hold(demand, "its pool has been asked for")
    asked = [create.pending_pool for create in draft.creates]
    excess = budgets.over_budget(wanted, world, asked, given.budget)
    if excess:
        draft.hold(demand, excess, failed=True)
        return
    _place(demand, wanted, name, refusals, now, draft)


def _gets_a_spare(
    demand: PoolDemand, wanted: PoolSpec, world: ClusterState, now: datetime, draft: _Draft
) -> bool:
    for pool in pool_lifetime.spare_pools(wanted, world, now):
        if pool.name not in draft.kept:
            draft.kept.add(pool.name)
            since = world.idle_since.get(pool.name)
            until = since + pool_lifetime.NODE_JOIN_TIMEOUT if since else None
            words = f"others run on its pool, and {pool.name}, made for them, is for it"
            draft.hold(demand, words, until=until)
            return True
    return False


def _pools_of(wanted: PoolSpec, world: ClusterState) -> list[ObservedPool]:
    """By the Job that they serve; pools of old may have only the name to go by."""
    job = (wanted.namespace, wanted.parent.name)
    return [
        pool
        for pool in world.pools
        if pool.managed
        and (pool.parent == job or (pool.parent is None and pool.name == wanted.name))
    ]


def _full(pool: ObservedPool, wanted: PoolSpec, world: ClusterState, now: datetime) -> bool:
    lame = world.not_serving_since.get(pool.name)
    ready = world.ready_nodes.get(pool.name, 0)
    waited = lame is not None and lame + OCCUPIED_AFTER <= now
    taken = ready >= pool.nodes > 0 or pool_lifetime.used_by_others(pool, wanted, world)
    return pool.status is PoolStatus.RUNNING and taken and waited


def _follow(
    pool: ObservedPool,
    demand: PoolDemand,
    wanted: PoolSpec,
    world: ClusterState,
    now: datetime,
    draft: _Draft,
) -> None:
    """What the state of an existing pool means for the pod that waits for it."""
    if pool.name in draft.deletes:
        return
    if _on_its_way_out(pool, world):
        draft.hold(demand, f"its pool {pool.name} is being deleted; a new one follows")
        return
    if pool_lifetime.used_by_others(pool, wanted, world):
        lame = world.not_serving_since.get(pool.name)
        until = lame + OCCUPIED_AFTER if lame else None
        draft.hold(demand, f"others run on its pool {pool.name}", until=until)
        return
    written = pool.labels.get(label_keys.HASH)
    if not pool_hashes.hash_matches(written, wanted.hash, wanted.legacy_hash(pool.capacity)):
        draft.delete(pool, "the pods now ask for another kind of pool", recreate=True)
        return
    told = f": {pool.message}" if pool.message else ""
    lame = world.not_serving_since.get(pool.name)
    match pool.status:
        case PoolStatus.ERROR:
            draft.delete(pool, f"it could not be made{told}", recreate=True)
        case PoolStatus.RUNNING_WITH_ERROR:
            hopeless = pool.failure_cause in (FailureCause.OUT_OF_STOCK, FailureCause.QUOTA)
            if hopeless or (lame is not None and lame + ERROR_GRACE <= now):
                draft.delete(pool, f"it runs with an error{told}", recreate=True)
            else:
                until = lame + ERROR_GRACE if lame else None
                draft.hold(demand, f"its pool has an error{told}", until=until)
        case PoolStatus.RUNNING:
            ready = world.ready_nodes.get(pool.name, 0)
            if ready >= pool.nodes > 0:
                until = lame + OCCUPIED_AFTER if lame else None
                draft.hold(demand, f"its pool {pool.name} is ready", until=until)
            elif pool.capacity is PoolCapacity.FLEX_START:
                draft.hold(demand, f"its pool {pool.name} waits for GKE to have {pool.nodes} nodes")
            elif lame is not None and lame + NOT_SERVING_TIMEOUT <= now:
                draft.delete(
                    pool, f"it serves nobody: {ready} of {pool.nodes} nodes ready", recreate=True
                )
            else:
                until = lame + NOT_SERVING_TIMEOUT if lame else None
                draft.hold(demand, f"its pool {pool.name} runs; nodes are joining", until=until)
        case _:
            draft.hold(demand, f"its pool {pool.name} is {pool.status.lower()}")


def _free_name(
    wanted: PoolSpec, existing: Sequence[ObservedPool], world: ClusterState
) -> str | None:
    """A third pool and more only where others are seen to run on all that there are: a pod that
    fits no node at all must not be given one pool after the other."""
    names = [wanted.name, wanted.long_name]
    if all(pool.name in world.users for pool in existing):
        names += wanted.extra_names
    there = {pool.name for pool in world.pools}
    return next((name for name in names if name not in there), None)


def _place(
    demand: PoolDemand,
    wanted: PoolSpec,
    name: str,
    refusals: RequestBackoff,
    now: datetime,
    draft: _Draft,
) -> None:
    """The first allowed place that has not just refused."""
    refused = refusals.failure_of(wanted)
    if refused is not None and refused.retry_at > now:
        draft.hold(demand, refused.message, failed=True, until=refused.retry_at)
        return
    told, moments = [], []
    for place in wanted.locations:
        refusal = refusals.failure_at(wanted, place)
        if refusal is None or refusal.retry_at <= now:
            draft.creates.append(
                CreatePool(spec=wanted, location=place, pool_name=name, pod=demand.pod)
            )
            return
        told.append(f"{place}: {refusal.message}")
        moments.append(refusal.retry_at)
    draft.hold(demand, "; ".join(told), failed=True, until=min(moments))
