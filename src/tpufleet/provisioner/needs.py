"""Who needs a pool, and for how long. Pure.

The scheduler may send pods to a pool that was made for another Job, unless the admission webhook
ties each to its own. So whoever runs on a pool keeps it, and whoever lost its pool to another may
have the one that was made for that other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

from tpufleet.provisioner import families, keys
from tpufleet.provisioner.pools import Wanted
from tpufleet.provisioner.seen import Owner, Pool, PoolStatus, Use, World
from tpufleet.provisioner.settings import Settings

# A watch may lag behind: a JobSet is taken as gone when it has been missing for a while.
MISSING_FOR = timedelta(seconds=2)
# A pool that nobody runs on, for its Job found room elsewhere, is kept for others this long.
IDLE_AFTER = timedelta(minutes=3)
# Nodes of a pool that runs join the cluster, and are given pods, within this.
JOINS_WITHIN = timedelta(minutes=2)
COMING = (PoolStatus.PROVISIONING, PoolStatus.RECONCILING, PoolStatus.RUNNING)
PERSONAL = (keys.PARENT_NAME, keys.OWNER_NAME, keys.OWNER_UID, keys.HASH,
            keys.PARENT_NAMESPACE, keys.OWNER_NAMESPACE)  # fmt: skip
_PAST = datetime.fromisoformat("2000-01-01T00:00:00+00:00")
_NEVER = datetime.fromisoformat("9000-01-01T00:00:00+00:00")


def needless(
    pool: Pool, owner: Owner | None, world: World, given: Settings
) -> tuple[str | None, datetime]:
    """Why the one it was made for does not need it (None: it does), and since when."""
    assert pool.owner is not None
    told = families.told(pool.owner)
    if owner is None:
        since = world.missing_since.get(pool.owner)
        if since is None:
            return None, _NEVER
        return f"{told} is gone", since + MISSING_FOR
    uid = pool.labels.get(keys.OWNER_UID)
    if uid and uid != owner.uid:
        return f"{told} was made anew; this pool served the old one", _PAST
    if owner.ended_at is not None:
        return f"{told} has ended", owner.ended_at
    if owner.suspended_at is not None:
        return f"{told} is suspended", owner.suspended_at + given.suspended_ttl
    idle = world.idle_since.get(pool.name)
    if idle is not None:
        return "its Job runs on another pool, and nobody on this one", idle + IDLE_AFTER
    return None, _NEVER


def at_work(pool: Pool, world: World) -> list[Use]:
    """Who runs on it and is to go on, whomever it was made for. Their end is news."""
    return [use for use in world.used.get(pool.name, ()) if lives(world.owners.get(use.owner))]


def lives(owner: Owner | None) -> bool:
    return owner is not None and owner.ended_at is None and owner.suspended_at is None


def serves_others(pool: Pool, wanted: Wanted, world: World) -> bool:
    ours = (wanted.namespace, wanted.parent.name)
    return any(use.parent != ours for use in at_work(pool, world))


def spare(wanted: Wanted, world: World, now: datetime) -> Iterator[Pool]:
    """Pools of the same kind that come or have just come, and whose own Jobs run on others. One
    that the pod could run on for longer, and does not, is of no use to it."""
    at_work_somewhere = {use.parent for uses in world.used.values() for use in uses}
    mine = _kind(wanted.config["labels"])
    for pool in world.pools:
        same = pool.machine_type == wanted.shape.machine_type and pool.nodes == wanted.shape.nodes
        if (
            pool.ours and pool.status in COMING and pool.parent in at_work_somewhere
            and pool.name not in world.used and pool.name not in world.stopping
            and same and pool.place in wanted.places and _kind(pool.labels) == mine
            and now < world.idle_since.get(pool.name, now) + JOINS_WITHIN
        ):  # fmt: skip
            yield pool


def _kind(labels: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in labels.items() if key not in PERSONAL}
