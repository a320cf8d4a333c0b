"""Remembers failed requests for node pools and when to try each again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

from tpufleet.backoff import BackoffPolicy
from tpufleet_gke.provisioner.model.cluster_state import FailureCause, PoolFailure
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
PERMANENT_BACKOFF = BackoffPolicy(first=PERMANENT_WAIT, longest=PERMANENT_WAIT, jitter=0.0)
# Each try costs a pool for some minutes, and only a change of the pod or the cluster helps.
MISFIT_BACKOFF = BackoffPolicy(first=timedelta(hours=1), longest=timedelta(days=1))
_BY_CAUSE = {
    FailureCause.PERMISSION: PERMANENT_BACKOFF,
    FailureCause.INVALID_REQUEST: PERMANENT_BACKOFF,
    FailureCause.POD_MISFIT: MISFIT_BACKOFF,
    FailureCause.TRANSIENT: TRANSIENT_BACKOFF,
}
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class FailedRequest:
    failure: PoolFailure
    failures: int  # consecutive
    retry_at: datetime


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
        self, pool: str, status: str, failure: PoolFailure, now: datetime
    ) -> None:
        """Even a permission is checked again soon."""
        previous = self._deletions.get((pool, status))
        self._deletions[pool, status] = _failed(previous, failure, TRANSIENT_BACKOFF, now, key=pool)

    def clear_deletion(self, pool: str) -> None:
        self._deletions = {key: one for key, one in self._deletions.items() if key[0] != pool}

    def record_location_failure(
        self,
        location: PoolLocation,
        machine_type: str,
        nodes: int,
        failure: PoolFailure,
        now: datetime,
    ) -> None:
        key = _location_key(location, machine_type, nodes)
        backoff = _BY_CAUSE.get(failure.cause, CAPACITY_BACKOFF)
        self._locations[key] = _failed(
            self._locations.get(key), failure, backoff, now, key=str(key)
        )

    def record_pool_failure(self, spec: PoolSpec, failure: PoolFailure, now: datetime) -> None:
        key = _pool_key(spec)
        transient = failure.cause is FailureCause.TRANSIENT
        backoff = BUSY_BACKOFF if transient else _BY_CAUSE.get(failure.cause, CAPACITY_BACKOFF)
        self._pools[key] = _failed(self._pools.get(key), failure, backoff, now, key=key)

    def clear_location(self, location: PoolLocation, machine_type: str, nodes: int) -> None:
        self._locations.pop(_location_key(location, machine_type, nodes), None)

    def expire_before(self, moment: datetime) -> None:
        """Forget failures whose wait ended before `moment`, so that the memory stays bounded."""
        self._locations = _since(self._locations, moment)
        self._pools = _since(self._pools, moment)
        self._deletions = _since(self._deletions, moment)


def _location_key(
    location: PoolLocation, machine_type: str, nodes: int
) -> tuple[str, str, str, int]:
    return location.zone, location.capacity.value, machine_type, nodes


def _pool_key(spec: PoolSpec) -> str:
    return f"{spec.name}|{spec.hash}"


def _since(failed: dict[Key, FailedRequest], moment: datetime) -> dict[Key, FailedRequest]:
    return {key: one for key, one in failed.items() if one.retry_at >= moment}


def _failed(
    previous: FailedRequest | None,
    failure: PoolFailure,
    backoff: BackoffPolicy,
    now: datetime,
    *,
    key: str,
) -> FailedRequest:
    failures = (previous.failures if previous else 0) + 1
    return FailedRequest(failure, failures, now + backoff.delay(failures, key=key))
