"""Who needs a pool, and for how long. Pure.

The scheduler may send pods to a pool that was made for another Job, unless the admission webhook
ties each to its own. So whoever runs on a pool keeps it, and whoever lost its pool to another may
have the one that was made for that other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

from tpufleet.provisioner.gke_api.pool_specs import PoolSpec
from tpufleet.provisioner.kube import label_keys, pod_owners
from tpufleet.provisioner.planning.cluster_state import (
    ClusterState,
    ObservedPool,
    OwnerStatus,
    PoolStatus,
    PoolUser,
)
from tpufleet.provisioner.settings import ProvisionerSettings

# A watch may lag behind: a JobSet is taken as gone when it has been missing for a while.
OWNER_MISSING_GRACE = timedelta(seconds=2)
# A pool that nobody runs on, for its Job found room elsewhere, is kept for others this long.
IDLE_GRACE = timedelta(minutes=3)
# Nodes of a pool that runs join the cluster, and are given pods, within this.
NODE_JOIN_TIMEOUT = timedelta(minutes=2)
USABLE_SOON = (PoolStatus.PROVISIONING, PoolStatus.RECONCILING, PoolStatus.RUNNING)
JOB_SPECIFIC_LABELS = (label_keys.PARENT_NAME, label_keys.OWNER_NAME, label_keys.OWNER_UID, label_keys.HASH,
            label_keys.PARENT_NAMESPACE, label_keys.OWNER_NAMESPACE)  # fmt: skip
_PAST = datetime.fromisoformat("2000-01-01T00:00:00+00:00")
_NEVER = datetime.fromisoformat("9000-01-01T00:00:00+00:00")


def unneeded_reason(
    pool: ObservedPool, owner: OwnerStatus | None, world: ClusterState, given: ProvisionerSettings
) -> tuple[str | None, datetime]:
    """Why the one it was made for does not need it (None: it does), and since when."""
    assert pool.owner is not None
    told = pod_owners.describe(pool.owner)
    if owner is None:
        since = world.owner_missing_since.get(pool.owner)
        if since is None:
            return None, _NEVER
        return f"{told} is gone", since + OWNER_MISSING_GRACE
    uid = pool.labels.get(label_keys.OWNER_UID)
    if uid and uid != owner.uid:
        return f"{told} was made anew; this pool served the old one", _PAST
    if owner.ended_at is not None:
        return f"{told} has ended", owner.ended_at
    if owner.suspended_at is not None:
        return f"{told} is suspended", owner.suspended_at + given.suspended_ttl
    idle = world.idle_since.get(pool.name)
    if idle is not None:
        return "its Job runs on another pool, and nobody on this one", idle + IDLE_GRACE
    return None, _NEVER


def active_users(pool: ObservedPool, world: ClusterState) -> list[PoolUser]:
    """Who runs on it and is to go on, whomever it was made for. Their end is news."""
    return [use for use in world.users.get(pool.name, ()) if is_active(world.owners.get(use.owner))]


def is_active(owner: OwnerStatus | None) -> bool:
    return owner is not None and owner.ended_at is None and owner.suspended_at is None


def used_by_others(pool: ObservedPool, wanted: PoolSpec, world: ClusterState) -> bool:
    ours = (wanted.namespace, wanted.parent.name)
    return any(use.parent != ours for use in active_users(pool, world))


def spare_pools(wanted: PoolSpec, world: ClusterState, now: datetime) -> Iterator[ObservedPool]:
    """Pools of the same kind that come or have just come, and whose own Jobs run on others. One
    that the pod could run on for longer, and does not, is of no use to it."""
    at_work_somewhere = {use.parent for uses in world.users.values() for use in uses}
    mine = _kind(wanted.node_config["labels"])
    for pool in world.pools:
        same = pool.machine_type == wanted.shape.machine_type and pool.nodes == wanted.shape.nodes
        if (
            pool.managed and pool.status in USABLE_SOON and pool.parent in at_work_somewhere
            and pool.name not in world.users and pool.name not in world.deleting
            and same and pool.location in wanted.locations and _kind(pool.labels) == mine
            and now < world.idle_since.get(pool.name, now) + NODE_JOIN_TIMEOUT
        ):  # fmt: skip
            yield pool


def _kind(labels: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in labels.items() if key not in JOB_SPECIFIC_LABELS}
