"""Maps groups and instances of Compute Engine to slice states. Pure.

A group is up when all of its VMs run and their topology is ACTIVE. Losing one VM is losing the
slice: its chips cannot work alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from tpufleet.errors import NoCapacity, ProviderError
from tpufleet.model.fleet.cloud_slices import CloudState
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.pools import RefusalKind, refusal_kind
from tpufleet.model.job.jobs import Capacity
from tpufleet.providers.base import RESERVATION_ENDED, RUN_ENDED, no_capacity_within
from tpufleet.providers.compute import error_mapping

Json = Mapping[str, Any]

# cloud.google.com/compute/docs/instances/instance-lifecycle
WAITING, COMING = ("PENDING",), ("PROVISIONING", "STAGING", "REPAIRING")
RUNNING = "RUNNING"
LEAVING = ("STOPPING", "PENDING_STOP", "SUSPENDING", "DEPROVISIONING")
WITHOUT_MACHINE = ("STOPPED", "TERMINATED", "SUSPENDED")
NEVER = datetime.max.replace(tzinfo=UTC)  # for a moment that cannot be read
# A group that was just made may not show yet that it waits.
BEGINS_WITHIN = timedelta(minutes=2)


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What a group or an instance is, as a slice."""

    state: CloudState
    message: str = ""
    refusal: RefusalKind = RefusalKind.CAPACITY
    fenced: bool = False
    notice: NoticeKind | None = None
    maintenance_at: datetime | None = None
    ends_at: datetime | None = None


def of_instance(instance: Json, capacity: Capacity) -> Observation:
    capacity = _ended_by([instance], capacity)
    status = str(instance.get("status", ""))
    if status == RUNNING:
        return _up([instance])
    if status in WAITING:
        return Observation(state=CloudState.PENDING, message="waiting for capacity")
    if status in LEAVING and capacity is Capacity.SPOT:
        return _noticed()
    if status in LEAVING or status in WITHOUT_MACHINE:
        return _lost(capacity, "its VM", status in WITHOUT_MACHINE)
    return Observation(state=CloudState.CREATING, message="creating the VM")


def of_group(
    group: Json,
    instances: Sequence[Json],
    errors: Sequence[Json],
    *,
    capacity: Capacity,
    patience: timedelta,
    now: datetime,
) -> Observation:
    """`errors`: what delays the VMs, apart from the group's own. `patience`: how long it may wait
    for capacity before that counts as refused."""
    capacity = _ended_by(instances, capacity)
    status: Json = group.get("status", {})
    size = int(group.get("targetSize", 0))
    found = [str(instance.get("status", "")) for instance in instances]
    # The listing of VMs may lack some for a while: the group counts them itself.
    counted = int((status.get("currentInstanceStatuses") or {}).get("running", 0))
    unlisted = min(size - len(found), counted - found.count(RUNNING))
    found += [RUNNING] * unlisted
    age = now - moment(group.get("creationTimestamp"), now)
    topology = topology_of(status)
    if _count(group, "deleting") >= max(len(found), 1):
        return Observation(state=CloudState.STOPPING, message="deleting")
    if topology.get("state") == "FAILED":
        return Observation(state=CloudState.FAILED, message=_why_failed(topology))
    if not size:  # resized by somebody, or by the end of what it may run
        return _lost(capacity, "its VMs", True)
    ready = found.count(RUNNING)
    if ready == size and (not _has_policy(group) or topology.get("state") == "ACTIVE"):
        return _up(instances)
    if _waits(group):
        some = any(each == RUNNING or each in COMING for each in found)
        coming = Observation(state=CloudState.CREATING, message=f"{ready} of {size} VMs run")
        if some and (is_bulk(group) or len(found) == size):
            return coming
        seen = _waiting(status, errors, capacity, patience, age)
        if some:  # the others may never come, and these cost meanwhile
            waits = seen.state is CloudState.PENDING
            seen = coming if waits else replace(seen, fenced=False)
        if not is_bulk(group):
            one_by_one = "; the zone refuses bulk mode: VMs are created one by one"
            seen = replace(seen, message=seen.message + one_by_one)
        return seen
    lost = sum(each in LEAVING or each in WITHOUT_MACHINE for each in found)
    if capacity is Capacity.SPOT and lost == found.count("STOPPING") > 0 and len(found) == size:
        return _noticed()
    if lost or len(found) < size:
        if not found and not topology and age < BEGINS_WITHIN:
            return Observation(state=CloudState.PENDING, message="requested")
        fenced = all(each in WITHOUT_MACHINE for each in found)
        gone = lost + size - len(found)
        what = "its VMs" if gone >= size else f"{gone} of its {size} VMs"
        return _lost(capacity, what, fenced)
    if ready < size:
        return Observation(state=CloudState.CREATING, message=f"{ready} of {size} VMs run")
    linking = str(topology.get("state", "ACTIVATING")).lower()
    return Observation(state=CloudState.CREATING, message=f"joining its chips ({linking})")


def of_error(error: ProviderError) -> Observation:
    """Of an operation that failed."""
    kind = refusal_kind(error)
    state = CloudState.REFUSED if kind else CloudState.FAILED
    return Observation(
        state=state, message=str(error), refusal=kind or RefusalKind.CAPACITY, fenced=True
    )


def needs_errors(group: Json, instances: Sequence[Json]) -> bool:
    """Whether the group waits, and does not say for what."""
    running = any(instance.get("status") == RUNNING for instance in instances)
    told = bool(_progress_errors(group.get("status", {}))) or (running and is_bulk(group))
    return _waits(group) and not told


def moment(text: Any, default: datetime) -> datetime:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return default


def _up(instances: Sequence[Json]) -> Observation:
    """With what Google announces for the VMs: scheduled maintenance stops all of a slice."""
    starts: list[datetime] = []
    ends: list[datetime] = []
    for instance in instances:
        status: Json = instance.get("resourceStatus") or {}
        if end := (status.get("scheduling") or {}).get("terminationTimestamp"):
            ends.append(moment(end, NEVER))
        planned: Json = status.get("upcomingMaintenance") or {}
        if planned.get("maintenanceStatus") == "ONGOING":
            notice = NoticeKind.MAINTENANCE
            return Observation(state=CloudState.UP, notice=notice, message="maintenance has begun")
        if start := planned.get("windowStartTime"):
            starts.append(moment(start, NEVER))
    return Observation(
        state=CloudState.UP,
        maintenance_at=min(starts, default=None),
        ends_at=min(ends, default=None),
    )


def _waiting(
    status: Json, errors: Sequence[Json], capacity: Capacity, patience: timedelta, age: timedelta
) -> Observation:
    """A group waits without end, whatever the error: that it has waited enough is decided here."""
    error = error_mapping.of_errors([*_progress_errors(status), *errors], "waiting")
    if error is not None:
        in_queue = capacity is Capacity.QUEUED and isinstance(error, NoCapacity)
        if not in_queue and (kind := refusal_kind(error)) is not None:
            detail = str(error).partition(": ")[2]
            return Observation(state=CloudState.REFUSED, message=detail, refusal=kind, fenced=True)
    if age >= patience:
        return Observation(state=CloudState.REFUSED, message=no_capacity_within(age), fenced=True)
    return Observation(state=CloudState.PENDING, message="queued, waiting for capacity")


def _noticed() -> Observation:
    """A preempted VM runs for its last 30 seconds, in which its job can save a checkpoint."""
    return Observation(state=CloudState.UP, notice=NoticeKind.PREEMPTED, message="being preempted")


def _ended_by(instances: Sequence[Json], capacity: Capacity) -> Capacity:
    """VMs that are not bound to their reservation do not end with it: they are like others of
    on-demand capacity."""
    models = {(each.get("scheduling") or {}).get("provisioningModel") for each in instances}
    unbound = capacity is Capacity.RESERVED and "STANDARD" in models
    return Capacity.ON_DEMAND if unbound else capacity


def _lost(capacity: Capacity, what: str, fenced: bool) -> Observation:
    state = CloudState.FAILED if capacity is Capacity.ON_DEMAND else CloudState.PREEMPTED
    reasons = {
        Capacity.SPOT: f"preempted: {what} stopped",
        Capacity.ON_DEMAND: f"{what} stopped",
        Capacity.QUEUED: f"{what} were deleted: {RUN_ENDED}",
        Capacity.RESERVED: f"{what} were deleted: {RESERVATION_ENDED}",
    }
    notice = NoticeKind.PREEMPTED if capacity is Capacity.SPOT else None
    return Observation(state=state, message=reasons[capacity], fenced=fenced, notice=notice)


def _waits(group: Json) -> bool:
    """Without bulk mode a group shows only that VMs are being created."""
    bulk: Json = (group.get("status") or {}).get("bulkInstanceOperation") or {}
    creating = _count(group, "creating") + _count(group, "creatingWithoutRetries")
    return bool(bulk.get("inProgress")) or creating > 0


def is_bulk(group: Json) -> bool:
    return (group.get("targetSizePolicy") or {}).get("mode") == "BULK"


def _progress_errors(status: Json) -> list[Json]:
    check: Json = (status.get("bulkInstanceOperation") or {}).get("lastProgressCheck") or {}
    error: Json = check.get("error") or {}
    return list(error.get("errors", ())) or ([error] if error.get("code") else [])


def _count(group: Json, action: str) -> int:
    return int((group.get("currentActions") or {}).get(action, 0))


def _has_policy(group: Json) -> bool:
    return bool((group.get("resourcePolicies") or {}).get("workloadPolicy"))


def topology_of(status: Json) -> Json:
    return next(iter(status.get("appliedAcceleratorTopologies") or ()), {})


def _why_failed(topology: Json) -> str:
    error = (topology.get("stateDetails") or {}).get("error") or {}
    details = list(error.get("errors", ())) or [error]
    why = details[0].get("message") or details[0].get("code") or "no reason is given"
    return f"the chips of its VMs cannot be joined: {why}"


def config_of(group: Json) -> Json:
    """What all of its instances have."""
    return (group.get("allInstancesConfig") or {}).get("properties") or {}
