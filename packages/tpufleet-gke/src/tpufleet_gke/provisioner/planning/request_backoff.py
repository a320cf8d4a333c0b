"""Remembers failed requests for node pools and when to try each again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from tpufleet.backoff import BackoffPolicy
from tpufleet_gke.provisioner.model.cluster_state import FailureCause
from tpufleet_gke.provisioner.model.pool_specs import PoolLocation, PoolSpec

MAX_WAIT = timedelta(minutes=10)
CAPACITY_BACKOFF = BackoffPolicy(first=timedelta(seconds=15), longest=MAX_WAIT)
TRANSIENT_BACKOFF = BackoffPolicy(first=timedelta(seconds=2), longest=MAX_WAIT)
# For pools on which a pod was found when they were to be deleted. Its leader is seen soon.
KEPT_BACKOFF = BackoffPolicy(first=timedelta(seconds=2), longest=timedelta(minutes=1))
# For creations that GKE is too busy to accept: they cost nothing.
BUSY_BACKOFF = BackoffPolicy(first=timedelta(seconds=2), longest=timedelta(seconds=30))
# Someone has to grant a permission or change the request; check again now and then.
PERMANENT_WAIT = timedelta(hours=1)
# Each try costs a pool for some minutes, and only a change of the pod or the cluster helps.
MISFIT_BACKOFF = BackoffPolicy(first=timedelta(hours=1), longest=timedelta(days=1))


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRequest:
    message: str
    retry_at: datetime
    failures: int  # consecutive
    cause: FailureCause
    detail: str = ""  # Google's whole text


class RequestBackoff:
    def __init__(self) -> None:
        self._locations: dict[tuple[str, str, str, int], FailedRequest] = {}
        self._pools: dict[str, FailedRequest] = {}
        # By pool and its status: GKE refuses to delete a pool that it is creating or upgrading, and
        # accepts it as soon as that is over.
        self._deletions: dict[tuple[str, str], FailedRequest] = {}

    def failure_at(self, spec: PoolSpec, location: PoolLocation) -> FailedRequest | None:
        key = _location_key(location, spec.shape.machine_type, spec.shape.nodes)
        return self._locations.get(key)

    def failure_of(self, spec: PoolSpec) -> FailedRequest | None:
        """Of this exact request: a changed one is sent at once."""
        return self._pools.get(_pool_key(spec))

    def failed_deletion(self, pool: str, status: str) -> FailedRequest | None:
        return self._deletions.get((pool, status))

    def record_failed_deletion(
        self, pool: str, status: str, cause: FailureCause, message: str, now: datetime
    ) -> None:
        """Even a permission is checked again soon."""
        previous = self._deletions.get((pool, status))
        failures = (previous.failures if previous else 0) + 1
        wait = TRANSIENT_BACKOFF.delay(failures, key=pool)
        self._deletions[pool, status] = FailedRequest(
            message=message, retry_at=now + wait, failures=failures, cause=cause
        )

    def clear_deletion(self, pool: str) -> None:
        self._deletions = {key: one for key, one in self._deletions.items() if key[0] != pool}

    def record_location_failure(
        self,
        location: PoolLocation,
        machine_type: str,
        nodes: int,
        *,
        cause: FailureCause,
        message: str,
        now: datetime,
        detail: str = "",
    ) -> None:
        key = _location_key(location, machine_type, nodes)
        failed = _next_failure(self._locations.get(key), cause, message, now, key=str(key))
        self._locations[key] = replace(failed, detail=detail)

    def record_pool_failure(
        self,
        spec: PoolSpec,
        cause: FailureCause,
        message: str,
        now: datetime,
        detail: str = "",
    ) -> None:
        key = _pool_key(spec)
        failed = _next_failure(self._pools.get(key), cause, message, now, key=key)
        if cause is FailureCause.TRANSIENT:
            failed = replace(failed, retry_at=now + BUSY_BACKOFF.delay(failed.failures, key=key))
        self._pools[key] = replace(failed, detail=detail)

    def clear_location(self, location: PoolLocation, machine_type: str, nodes: int) -> None:
        self._locations.pop(_location_key(location, machine_type, nodes), None)

    def expire_before(self, moment: datetime) -> None:
        """Forget failures whose wait ended before `moment`, so that the memory stays bounded."""
        self._locations = {
            key: failure for key, failure in self._locations.items() if failure.retry_at >= moment
        }
        self._pools = {
            key: failure for key, failure in self._pools.items() if failure.retry_at >= moment
        }
        self._deletions = {
            key: failure for key, failure in self._deletions.items() if failure.retry_at >= moment
        }


def _location_key(
    location: PoolLocation, machine_type: str, nodes: int
) -> tuple[str, str, str, int]:
    return location.zone, location.capacity.value, machine_type, nodes


def _pool_key(spec: PoolSpec) -> str:
    return f"{spec.name}|{spec.hash}"


def _next_failure(
    previous: FailedRequest | None, cause: FailureCause, message: str, now: datetime, *, key: str
) -> FailedRequest:
    failures = (previous.failures if previous else 0) + 1
    if cause in (FailureCause.PERMISSION, FailureCause.INVALID_REQUEST):
        wait = PERMANENT_WAIT
    elif cause is FailureCause.POD_MISFIT:
        wait = MISFIT_BACKOFF.delay(failures, key=key)
    elif cause is FailureCause.TRANSIENT:
        wait = TRANSIENT_BACKOFF.delay(failures, key=key)
    else:
        wait = CAPACITY_BACKOFF.delay(failures, key=key)
    return FailedRequest(message=message, retry_at=now + wait, failures=failures, cause=cause)
