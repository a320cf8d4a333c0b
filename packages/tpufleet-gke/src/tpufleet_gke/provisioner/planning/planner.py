"""Which node pools to create and delete, from what is demanded and what exists. Pure.

Only failed requests are remembered between plans, so a provisioner that dies loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from tpufleet_gke.provisioner.model.cluster_state import (
    ClusterState,
    FailureCause,
    ObservedPool,
    PendingPool,
    PoolDemand,
    PoolFailure,
    PoolStatus,
)
from tpufleet_gke.provisioner.model.pool_specs import PoolCapacity, PoolLocation, PoolSpec
from tpufleet_gke.provisioner.planning import (
    budgets,
    cordons,
    gang_queue,
    pool_lifetime,
    pool_needs,
    warm_pools,
)
from tpufleet_gke.provisioner.planning.gang_queue import Gang
from tpufleet_gke.provisioner.planning.pool_plan import (
    CreatePool,
    DeletePool,
    PodMisfit,
    PoolPlan,
    WaitingPod,
)
from tpufleet_gke.provisioner.planning.request_backoff import FailedRequest, RequestBackoff
from tpufleet_gke.provisioner.planning.warm_pools import AdoptPool
from tpufleet_gke.provisioner.settings import ProvisionerSettings

# The scheduler gets this long to place a pod before its reason is reported, or another Job on the
# pool is taken to occupy it.
SCHEDULING_GRACE = timedelta(seconds=15)
ERROR_GRACE = timedelta(minutes=5)  # for a pool that runs with a transient error
# Nodes of a running pool join the cluster and get pods within this time.
NODE_JOIN_TIMEOUT = timedelta(minutes=2)
RECHECK_UNKNOWN = timedelta(seconds=5)
ADOPTED = "given to it"


def plan_pools(
    state: ClusterState, backoff: RequestBackoff, settings: ProvisionerSettings, now: datetime
) -> PoolPlan:
    """A gang gets all of its pools or none; those that have waited longest are served first."""
    planner = _Planner(state, backoff, settings, now)
    for pool in state.pools:
        if pool.managed and not planner.is_being_deleted(pool):
            planner.delete_if_unneeded(pool)
    for gang in gang_queue.gangs_in_order(state):
        planner.serve(gang)
    planner.release_partial_gangs()
    for demand in state.stranded:
        planner.explain(demand)
    return cordons.cordon_first(planner.plan(), planner.held, state, settings, now)


@dataclass(frozen=True, slots=True)
class _Wanted:
    demand: PoolDemand
    spec: PoolSpec
    name: str
    location: PoolLocation


@dataclass(slots=True)
class _Planner:
    """Collects one plan."""

    state: ClusterState
    backoff: RequestBackoff
    settings: ProvisionerSettings
    now: datetime
    creates: list[CreatePool] = field(default_factory=list)
    deletes: dict[str, DeletePool] = field(default_factory=dict)
    adoptions: dict[str, AdoptPool] = field(default_factory=dict)
    waiting: list[WaitingPod] = field(default_factory=list)
    misfits: list[PodMisfit] = field(default_factory=list)
    recheck_times: list[datetime] = field(default_factory=list)
    reserved: list[PendingPool] = field(default_factory=list)  # for gangs that have begun
    blocked: list[tuple[Gang, WaitingPod]] = field(default_factory=list)
    assigned_spares: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)  # not deleted yet, because GKE refused to

    def plan(self) -> PoolPlan:
        return PoolPlan(
            creates=tuple(self.creates),
            deletes=tuple(self.deletes.values()),
            adoptions=tuple(self.adoptions.values()),
            waiting=tuple(self.waiting),
            misfits=tuple(self.misfits),
            recheck_at=min((at for at in self.recheck_times if at > self.now), default=None),
        )

    def is_being_deleted(self, pool: ObservedPool) -> bool:
        return pool.status is PoolStatus.STOPPING or pool.name in self.state.deleting

    def delete_if_unneeded(self, pool: ObservedPool) -> None:
        if pool.owner is None:
            return  # labelled by a user; not created by the provisioner
        owner = self.state.owners.get(pool.owner)
        reason, since = pool_lifetime.unneeded_reason(pool, owner, self.state, self.settings)
        if reason is None or pool_lifetime.active_users(pool, self.state):
            return
        if pool.name in self.state.adopting:
            return  # its labels still name the JobSet before
        if warm_pools.is_changing(pool, self.state, self.settings):
            return
        due = since + self.settings.deletion_delay
        if warm_pools.is_warm(pool, self.state, self.settings):
            unused_since = max(since, self.state.unused_since[pool.name])
            due = max(due, unused_since + self.settings.warm_pool_ttl)
            reason = f"{reason}, and no other has used it since {unused_since:%Y-%m-%d %H:%M} UTC"
        youngest_node_at = self.state.youngest_node_at.get(pool.name)
        if youngest_node_at is not None:
            due = max(due, youngest_node_at + self.settings.node_min_lifespan)
        if due > self.now:
            self.recheck_times.append(due)
            return
        self._add_delete(DeletePool(pool=pool, reason=reason, orphan=owner is None))

    def serve(self, gang: Gang) -> None:
        outcomes: list[_Wanted | WaitingPod | None] = []
        for demand in gang.demands:
            outcomes.append(self._serve(demand, outcomes))
        wanted = [one for one in outcomes if isinstance(one, _Wanted)]
        waiting = [one for one in outcomes if isinstance(one, WaitingPod)]
        # A request that passes soon delays no other slice.
        lasting = (one for one in waiting if one.cause not in (None, FailureCause.TRANSIENT))
        blocked = next(lasting, None)
        if blocked is not None:
            reason = f"pod {blocked.pod.name} of the same JobSet: {blocked.reason}"
            for one in wanted:
                self._wait(
                    one.demand, reason, report=True, until=blocked.until, cause=blocked.cause
                )
        elif wanted:
            blocked = self._check_budget(gang, wanted)
        if blocked is None:
            self.creates += [
                CreatePool(
                    spec=one.spec, location=one.location, pool_name=one.name, pod=one.demand.pod
                )
                for one in wanted
            ]
        else:
            self.blocked.append((gang, blocked))
        if gang.pools:
            left_out = [one.demand for one in wanted] if blocked is not None else []
            self.reserved += gang.reservation(left_out)

    def _check_budget(self, gang: Gang, wanted: Sequence[_Wanted]) -> WaitingPod | None:
        """None when there is room for the whole gang."""
        specs = [one.spec for one in wanted]
        specs += [replace(specs[0], shape=member.shape) for member in gang.unseen]
        planned = [*(create.pending_pool for create in self.creates), *self.reserved]
        excess = budgets.over_budget(specs, self.state, planned, self.settings)
        if not excess:
            return None
        evicting = self._evict_warm(specs, planned, excess)
        for one in wanted:
            self._wait(
                one.demand, excess, report=not evicting,
                cause=None if evicting else FailureCause.QUOTA,
            )  # fmt: skip
        return self.waiting[-1]

    def explain(self, demand: PoolDemand) -> None:
        """A pod whose Job has its node pool already: no other one is to come."""
        job = demand.pod.namespace, demand.pod.job
        due = demand.since + NODE_JOIN_TIMEOUT
        if job not in self.state.placed_jobs:
            return  # it waits with its leader
        if due > self.now:
            self.recheck_times.append(due)
            return
        pool = next(
            (
                pool
                for pool in self.state.pools
                if any(user.parent == job for user in self.state.users.get(pool.name, ()))
            ),
            None,
        )
        if pool is None:
            return
        owner = self.state.owners.get((demand.pod.namespace, demand.pod.owner_name))
        member = owner.members.get(demand.pod.job) if owner else None
        nodes = f"{self.state.ready_nodes.get(pool.name, 0)} of {pool.nodes} nodes ready"
        hint = "; GKE replaces the missing ones"
        if self.state.ready_nodes.get(pool.name, 0) >= pool.nodes:
            hint = f": {demand.scheduler_message}" if demand.scheduler_message else ""
            if member is not None and member.pods > pool.nodes:
                hint = f", for {member.pods} pods at a time; set parallelism to {pool.nodes}"
        self._wait(
            demand, f"no room on node pool {pool.name} of its Job: {nodes}{hint}",
            report=True, cause=FailureCause.POD_MISFIT,
        )  # fmt: skip

    def release_partial_gangs(self) -> None:
        """Slices that wait in vain for the others are paid for nothing, with running pods too. The
        gang that has waited longest gets twice as long: others may release what it lacks."""
        oldest = None
        if len(self.blocked) > 1:
            oldest = min(
                (gang for gang, _ in self.blocked), key=lambda gang: (gang.since, gang.key)
            )
        for gang, waiting in self.blocked:
            pools = [pool for pool in gang.pools if not self.is_being_deleted(pool)]
            if not pools:
                continue
            due = gang.since + self.settings.not_serving_timeout * (2 if gang is oldest else 1)
            if due > self.now:
                self.recheck_times.append(due)
                continue
            for pool in pools:
                users = pool_lifetime.active_users(pool, self.state)
                if pool.name in self.deletes or any(user.owner != gang.key[:2] for user in users):
                    continue
                reason = f"its JobSet cannot get all of its slices: {waiting.reason}"
                self._add_delete(DeletePool(pool=pool, reason=reason, evict=bool(users)))

    def _serve(
        self, demand: PoolDemand, before: Sequence[_Wanted | WaitingPod | None]
    ) -> _Wanted | WaitingPod | None:
        """What it needs, or why it gets nothing for now; None where a pool is there or to come."""
        spec = demand.pool_spec
        if demand.left_to_gke:
            self.waiting.append(
                WaitingPod(pod=demand.pod, reason=demand.left_to_gke, report=True, left_to_gke=True)
            )
            return None
        if spec is None:
            cause = FailureCause.INVALID_REQUEST
            return self._wait(demand, demand.rejection, report=True, cause=cause)
        if not pool_lifetime.is_active(self.state.owners.get((spec.namespace, spec.owner_name))):
            return None  # the pod is about to be deleted
        existing = self._pools_for(spec)
        serving = next((pool for pool in existing if not self._is_occupied(pool, spec)), None)
        if serving is not None:
            self._follow(serving, demand, spec)
            return None
        if any(isinstance(one, _Wanted) and one.spec.parent == spec.parent for one in before):
            return None  # another pod of the same Job: one pool serves both
        if not self.state.knows_auto_provisioning:
            return self._wait(
                demand, "GKE has not described its node auto-provisioning yet",
                until=self.now + RECHECK_UNKNOWN,
            )  # fmt: skip
        failed = self.backoff.failure_of(spec)
        if failed is not None and failed.retry_at > self.now:
            return self._wait_after(demand, failed.failure, failed.retry_at)
        if existing and self._assign_spare(demand, spec):
            return None
        if self._adopt_warm(demand, spec):
            return None
        name = self._free_name(spec, existing)
        if name is None:
            return self._wait(
                demand,
                f"{len(existing)} node pools were created for it and it runs on none of them; if "
                "other Jobs occupy them, install the admission webhook",
                report=True,
            )
        if name in self.state.creating:
            return self._wait_for(demand, name, "requested")
        location = self._location(demand, spec)
        if isinstance(location, WaitingPod):
            return location
        return _Wanted(demand, spec, name, location)

    def _add_delete(self, delete: DeletePool) -> None:
        """Unless GKE refused it a moment ago, or a pod was found there."""
        kept_until = self.state.kept_until.get(delete.pool.name)
        if kept_until is not None and kept_until > self.now:
            self.recheck_times.append(kept_until)
            return
        failed = self.backoff.failed_deletion(delete.pool.name, delete.pool.status)
        if failed is not None and failed.retry_at > self.now:
            self.recheck_times.append(failed.retry_at)
            self.held.add(delete.pool.name)
            return
        self.deletes.setdefault(delete.pool.name, delete)

    def _wait(
        self,
        demand: PoolDemand,
        reason: str,
        *,
        report: bool = False,
        until: datetime | None = None,
        cause: FailureCause | None = None,
        detail: str = "",
    ) -> WaitingPod:
        waiting = WaitingPod(
            pod=demand.pod, reason=reason, report=report, until=until, cause=cause, detail=detail
        )
        self.waiting.append(waiting)
        if until is not None:
            self.recheck_times.append(until)
        return waiting

    def _wait_for(
        self, demand: PoolDemand, pool: str, state: str, until: datetime | None = None
    ) -> WaitingPod:
        """A pool that is on its way; shown only by a dry run."""
        return self._wait(demand, f"node pool {pool}: {state}", until=until)

    def _wait_after(self, demand: PoolDemand, failure: PoolFailure, until: datetime) -> WaitingPod:
        return self._wait(
            demand, failure.message, report=True, until=until, cause=failure.cause,
            detail=failure.detail,
        )  # fmt: skip

    def _pools_for(self, spec: PoolSpec) -> list[ObservedPool]:
        """By parent Job; pools of old versions are recognised only by name."""
        parent = (spec.namespace, spec.parent.name)
        return [
            pool
            for pool in self.state.pools
            if pool.managed
            and (pool.parent == parent or (pool.parent is None and pool.name == spec.name))
        ]

    def _is_occupied(self, pool: ObservedPool, spec: PoolSpec) -> bool:
        since = self.state.not_serving_since.get(pool.name)
        return (
            pool.status is PoolStatus.RUNNING
            and pool_lifetime.used_by_others(pool, spec, self.state)
            and since is not None
            and since + SCHEDULING_GRACE <= self.now
        )

    def _follow(self, pool: ObservedPool, demand: PoolDemand, spec: PoolSpec) -> None:
        """What the status of an existing pool means for the pod that waits for it."""
        if pool.name in self.deletes:
            return
        if self.is_being_deleted(pool):
            self._wait_for(demand, pool.name, "being deleted")
            return
        since = self.state.not_serving_since.get(pool.name)
        if pool_lifetime.used_by_others(pool, spec, self.state):
            until = since + SCHEDULING_GRACE if since else None
            self._wait_for(demand, pool.name, "used by another Job", until)
            return
        unmet = pool_needs.unmet_need(pool, spec)
        if unmet:
            self._add_delete(DeletePool(pool=pool, reason=f"its pods now require {unmet}"))
            return
        message = pool.failure.message if pool.failure else ""
        status = f"{pool.status}: {message}" if message else str(pool.status)
        match pool.status:
            case PoolStatus.ERROR:
                self._add_delete(DeletePool(pool=pool, reason=status))
            case PoolStatus.RUNNING_WITH_ERROR:
                cause = pool.failure.cause if pool.failure else None
                no_capacity = cause in (FailureCause.OUT_OF_STOCK, FailureCause.QUOTA)
                if no_capacity or (since is not None and since + ERROR_GRACE <= self.now):
                    self._add_delete(DeletePool(pool=pool, reason=status))
                else:
                    until = since + ERROR_GRACE if since else None
                    self._wait_for(demand, pool.name, status, until)
            case PoolStatus.RUNNING:
                self._follow_running(pool, demand, spec, since)
            case _:
                self._wait_for(demand, pool.name, status)

    def _follow_running(
        self, pool: ObservedPool, demand: PoolDemand, spec: PoolSpec, since: datetime | None
    ) -> None:
        ready = self.state.ready_nodes.get(pool.name, 0)
        chips = self.state.ready_chips.get(pool.name, 0)
        nodes_ready = f"{ready} of {pool.nodes} nodes ready"
        if ready >= pool.nodes > 0:
            nodes_ready += f", {chips} of {pool.chips} chips registered by the device plugin"
        if self.state.is_complete(pool):
            self._follow_complete(pool, demand, spec)
        elif pool.capacity is PoolCapacity.FLEX_START:
            self._wait_for(demand, pool.name, "awaits flex-start capacity")
        elif since is not None and since + self.settings.not_serving_timeout <= self.now:
            self._add_delete(DeletePool(pool=pool, reason=f"no pod runs on it: {nodes_ready}"))
        else:
            until = since + self.settings.not_serving_timeout if since else None
            self._wait_for(demand, pool.name, nodes_ready, until)

    def _follow_complete(self, pool: ObservedPool, demand: PoolDemand, spec: PoolSpec) -> None:
        """Everything is there. Once no other Job has used it for a while, the pod does not fit:
        another pool of the same kind would not fit either."""
        since = self.state.free_since.get(pool.name)
        if since is None or since + SCHEDULING_GRACE > self.now:
            until = since + SCHEDULING_GRACE if since else None
            self._wait_for(demand, pool.name, "ready", until)
            return
        reason = self._misfit_reason(pool, demand)
        until = since + self.settings.not_serving_timeout
        if until > self.now:
            self._wait(demand, reason, report=True, until=until, cause=FailureCause.POD_MISFIT)
            return
        self._add_delete(DeletePool(pool=pool, reason=reason, misfit=spec))

    def _assign_spare(self, demand: PoolDemand, spec: PoolSpec) -> bool:
        for pool in pool_lifetime.spare_pools(spec, self.state):
            if pool.name in self.assigned_spares:
                continue
            # Once it is complete, the scheduler gets as long again to see it.
            since = self.state.free_since.get(pool.name) or self.state.idle_since.get(pool.name)
            until = since + NODE_JOIN_TIMEOUT if since else None
            if until is None or until > self.now:
                self.assigned_spares.add(pool.name)
                self._wait_for(demand, pool.name, "free; its own is used", until)
                return True
            if self.state.is_complete(pool):
                # It has been free and complete for long: a pool of its own would not fit either.
                reason = self._misfit_reason(pool, demand)
                self.misfits.append(PodMisfit(spec=spec, reason=reason))
                self._wait(demand, reason, report=True, cause=FailureCause.POD_MISFIT)
                return True
        return False

    def _adopt_warm(self, demand: PoolDemand, spec: PoolSpec) -> bool:
        parent = (spec.namespace, spec.parent.name)
        for name, other in self.state.adopting.items():
            if other == parent:
                self._wait_for(demand, name, ADOPTED)
                return True
        for pool in warm_pools.adoptable(spec, self.state, self.settings):
            if pool.name in self.deletes or pool.name in self.adoptions:
                continue
            self.adoptions[pool.name] = AdoptPool(pool=pool, spec=spec, pod=demand.pod)
            self._wait_for(demand, pool.name, ADOPTED)
            return True
        changing = warm_pools.changing_for(spec, self.state, self.settings)
        if changing is not None:
            self._wait_for(demand, changing.name, changing.status)
            return True
        return False

    def _evict_warm(
        self, specs: Sequence[PoolSpec], planned: Sequence[PendingPool], excess: str
    ) -> bool:
        """Delete warm pools of other kinds that the budget has no room for."""
        warm = [
            pool
            for pool in self.state.pools
            if warm_pools.is_warm(pool, self.state, self.settings)
            and pool.name not in self.adoptions
            and pool.name not in self.state.adopting
            and pool.name not in self.deletes
        ]
        deleting = [pool.name for pool in self.state.pools if self.is_being_deleted(pool)]
        evicted = warm_pools.pools_to_evict(
            specs, self.state, planned, self.settings, warm, [*deleting, *self.deletes]
        )
        if evicted is None or self.settings.warm_pool_ttl <= timedelta(0):
            return False
        for pool in evicted:
            self._add_delete(DeletePool(pool=pool, reason=excess))
        return True

    def _misfit_reason(self, pool: ObservedPool, demand: PoolDemand) -> str:
        """In the scheduler's words, which mean nothing once the nodes are cordoned."""
        earlier = self.state.cordon_reasons.get(pool.name)
        if earlier and pool.name in self.state.cordoned:
            return earlier
        message = demand.scheduler_message or "the scheduler gave no reason"
        return f"the pod does not fit node pool {pool.name}: {message}"

    def _free_name(self, spec: PoolSpec, existing: Sequence[ObservedPool]) -> str | None:
        """More than two pools only while other Jobs are seen to use all existing ones: a pod that
        fits no node at all must not get one pool after another."""
        names = [spec.name, spec.long_name]
        if all(pool.name in self.state.users for pool in existing):
            names += spec.extra_names
        taken = {pool.name for pool in self.state.pools}
        return next((name for name in names if name not in taken), None)

    def _location(self, demand: PoolDemand, spec: PoolSpec) -> PoolLocation | WaitingPod:
        """The first allowed one that is not backing off."""
        failures: list[tuple[PoolLocation, FailedRequest]] = []
        for location in spec.locations:
            failed = self.backoff.failure_at(spec, location)
            if failed is None or failed.retry_at <= self.now:
                return location
            failures.append((location, failed))
        soonest = min((failed for _, failed in failures), key=lambda failed: failed.retry_at)
        visible = [(location, failed.seen_by(spec.namespace)) for location, failed in failures]
        failure = PoolFailure(
            soonest.failure.cause,
            "; ".join(f"{location}: {failure.message}" for location, failure in visible),
            "\n".join(filter(None, (failure.detail for _, failure in visible))),
        )
        return self._wait_after(demand, failure, soonest.retry_at)
