"""Remembers failed requests for node pools and when to try each again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from tpufleet.backoff import BackoffPolicy
from tpufleet.provisioner.gke.pool_specs import PoolLocation, PoolSpec
from tpufleet.provisioner.planning.cluster_state import FailureCause

MAX_WAIT = timedelta(minutes=10)
CAPACITY_BACKOFF = BackoffPolicy(first=timedelta(seconds=15), longest=MAX_WAIT)
TRANSIENT_BACKOFF = BackoffPolicy(first=timedelta(seconds=2), longest=MAX_WAIT)
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


class RequestBackoff:
    def __init__(self) -> None:
        self._locations: dict[tuple[str, str, str, int], FailedRequest] = {}
        self._pools: dict[str, FailedRequest] = {}
        self._deletions: dict[str, FailedRequest] = {}  # by pool name

    def failure_at(self, spec: PoolSpec, location: PoolLocation) -> FailedRequest | None:
        key = _location_key(location, spec.shape.machine_type, spec.shape.nodes)
        return self._locations.get(key)

    def failure_of(self, spec: PoolSpec) -> FailedRequest | None:
        """Of this exact request: a changed one is sent at once."""
        return self._pools.get(_pool_key(spec))

    def failed_deletion(self, pool: str) -> FailedRequest | None:
        return self._deletions.get(pool)

    def record_failed_deletion(
        self, pool: str, cause: FailureCause, message: str, now: datetime
    ) -> None:
        """The pool is paid for meanwhile, so even a permission is checked again soon."""
        failures = (self._deletions[pool].failures if pool in self._deletions else 0) + 1
        wait = TRANSIENT_BACKOFF.delay(failures, key=pool)
        self._deletions[pool] = FailedRequest(
            message=message, retry_at=now + wait, failures=failures, cause=cause
        )

    def clear_deletion(self, pool: str) -> None:
        self._deletions.pop(pool, None)

    def record_location_failure(
        self,
        location: PoolLocation,
        machine_type: str,
        nodes: int,
        *,
        cause: FailureCause,
        message: str,
        now: datetime,
    ) -> None:
        key = _location_key(location, machine_type, nodes)
        self._locations[key] = _next_failure(
            self._locations.get(key), cause, message, now, key=str(key)
        )

    def record_pool_failure(
        self, spec: PoolSpec, cause: FailureCause, message: str, now: datetime
    ) -> None:
        key = _pool_key(spec)
        self._pools[key] = _next_failure(self._pools.get(key), cause, message, now, key=key)

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
            pool: failure for pool, failure in self._deletions.items() if failure.retry_at >= moment
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
