"""Which Jobs need a pool, and for how long. Pure.

Unless the admission webhook ties each Job to its own pool, the scheduler may place pods on a pool
that was created for another Job. So a pool is kept for whichever Job runs on it, and a Job whose
pool is occupied may use the pool of the Job that occupies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

from tpufleet_gke.provisioner.model import label_keys, pod_owners
from tpufleet_gke.provisioner.model.cluster_state import (
    ClusterState,
    ObservedPool,
    PoolStatus,
    PoolUser,
)
from tpufleet_gke.provisioner.model.pod_owners import OwnerStatus
from tpufleet_gke.provisioner.model.pool_specs import PoolSpec
from tpufleet_gke.provisioner.settings import ProvisionerSettings

# A watch may lag, so a JobSet counts as deleted only after it has been missing for this long.
OWNER_MISSING_GRACE = timedelta(seconds=2)
IDLE_GRACE = timedelta(minutes=3)  # for a pool whose Job runs on another one
USABLE_SOON = (PoolStatus.PROVISIONING, PoolStatus.RECONCILING, PoolStatus.RUNNING)
# Labels that differ between two pools of the same kind.
JOB_SPECIFIC_LABELS = (
    label_keys.PARENT_NAME,
    label_keys.OWNER_NAME,
    label_keys.OWNER_UID,
    label_keys.HASH,
    label_keys.PARENT_NAMESPACE,
    label_keys.OWNER_NAMESPACE,
)
_PAST = datetime.fromisoformat("2000-01-01T00:00:00+00:00")
_NEVER = datetime.fromisoformat("9000-01-01T00:00:00+00:00")


def unneeded_reason(
    pool: ObservedPool,
    owner: OwnerStatus | None,
    state: ClusterState,
    settings: ProvisionerSettings,
) -> tuple[str | None, datetime]:
    """Why its owner does not need the pool (None when it does), and since when."""
    assert pool.owner is not None
    name = pod_owners.describe(pool.owner)
    if owner is None:
        since = state.owner_missing_since.get(pool.owner)
        if since is None:
            return None, _NEVER
        return f"{name} was deleted", since + OWNER_MISSING_GRACE
    uid = pool.labels.get(label_keys.OWNER_UID)
    if uid and uid != owner.uid:
        return f"{name} was recreated; this pool belongs to its predecessor", _PAST
    if owner.ended_at is not None:
        return f"{name} has ended", owner.ended_at
    if owner.suspended_at is not None:
        return f"{name} is suspended", owner.suspended_at + settings.suspended_ttl
    completed_at = state.completed_jobs.get(pool.parent) if pool.parent else None
    if completed_at is not None and pool.parent is not None:
        return f"Job {'/'.join(pool.parent)} is complete", completed_at
    idle_since = state.idle_since.get(pool.name)
    if idle_since is None:
        return None, _NEVER
    complete = _complete_owner_of_host_pool(pool, state)
    if complete is not None:
        return (
            f"its Job runs on the pool of Job {'/'.join(complete)}, which is complete",
            state.completed_jobs[complete],
        )
    return "idle: its Job runs on another pool", idle_since + IDLE_GRACE


def _complete_owner_of_host_pool(pool: ObservedPool, state: ClusterState) -> tuple[str, str] | None:
    """The Job of `pool` runs on another pool: the Job which that one was created for, if it is
    complete."""
    for other in state.pools:
        users = state.users.get(other.name, ())
        if other.parent in state.completed_jobs and any(one.parent == pool.parent for one in users):
            return other.parent
    return None


def active_users(pool: ObservedPool, state: ClusterState) -> list[PoolUser]:
    """Jobs that run on the pool and have not ended, whatever the pool was created for."""
    return [
        user for user in state.users.get(pool.name, ()) if is_active(state.owners.get(user.owner))
    ]


def is_active(owner: OwnerStatus | None) -> bool:
    return owner is not None and owner.ended_at is None and owner.suspended_at is None


def used_by_others(pool: ObservedPool, spec: PoolSpec, state: ClusterState) -> bool:
    parent = (spec.namespace, spec.parent.name)
    return any(user.parent != parent for user in active_users(pool, state))


def spare_pools(spec: PoolSpec, state: ClusterState) -> Iterator[ObservedPool]:
    """Pools of the same kind that are or will soon be running, and whose own Jobs run elsewhere."""
    running_parents = {user.parent for users in state.users.values() for user in users}
    labels = _shared_labels(spec.node_config["labels"])
    for pool in state.pools:
        same_shape = pool.machine_type == spec.shape.machine_type and pool.nodes == spec.shape.nodes
        if (
            pool.managed
            and pool.status in USABLE_SOON
            and pool.parent in running_parents
            and pool.name not in state.users
            and pool.name not in state.deleting
            and same_shape
            and pool.location in spec.locations
            and _shared_labels(pool.labels) == labels
        ):
            yield pool


def _shared_labels(labels: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in labels.items() if key not in JOB_SPECIFIC_LABELS}
