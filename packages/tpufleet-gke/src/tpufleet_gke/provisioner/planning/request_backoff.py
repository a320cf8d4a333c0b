"""Remembers failed requests for node pools and when to try each again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

from tpufleet.backoff import BackoffPolicy
from tpufleet.errors import BadInput
from tpufleet.model.fleet import compute_reservations
from tpufleet_gke.provisioner.model import label_keys
from tpufleet_gke.provisioner.model.cluster_state import FailureCause, ObservedPool, PoolFailure
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
# Other tenants meet the same shortage. Of a reservation, only those who name it.
SHARED_CAUSES = (FailureCause.OUT_OF_STOCK, FailureCause.QUOTA)
_OF_OTHERS = {
    cause: f"no {what} for another request a moment ago"
    for cause, what in zip(SHARED_CAUSES, ("capacity", "quota"), strict=True)
}
Key = TypeVar("Key")
# Location, machine type, nodes, reservation and, unless the cause is shared, the request.
LocationKey = tuple[PoolLocation, str, int, str, str]


@dataclass(frozen=True, slots=True)
class FailedRequest:
    failure: PoolFailure
    failures: int  # consecutive
    retry_at: datetime
    namespace: str = ""  # of the JobSet whose request failed

    def seen_by(self, namespace: str) -> PoolFailure:
        """Google's texts name pools, which are named after JobSets: other tenants do not see
        them."""
        if namespace == self.namespace:
            return self.failure
        return PoolFailure(self.failure.cause, _OF_OTHERS.get(self.failure.cause, "refused"))


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolKind:
    """Which requests fail together at a location: those of one kind where capacity is short, and
    otherwise only those of one Job."""

    machine_type: str
    nodes: int
    reservation: str
    namespace: str
    parent: str
    hash: str

    @classmethod
    def of_spec(cls, spec: PoolSpec) -> PoolKind:
        return cls(
            machine_type=spec.shape.machine_type, nodes=spec.shape.nodes,
            reservation=_without_project(spec.reservation), namespace=spec.namespace,
            parent=spec.parent.name, hash=spec.hash,
        )  # fmt: skip

    @classmethod
    def of_pool(cls, pool: ObservedPool) -> PoolKind:
        namespace, parent = pool.parent or ("", pool.name)
        return cls(
            machine_type=pool.machine_type, nodes=pool.nodes,
            reservation=_without_project(pool.reservation), namespace=namespace,
            parent=parent, hash=pool.labels.get(label_keys.HASH, ""),
        )  # fmt: skip

    @property
    def request(self) -> str:
        """This exact request: a changed one is sent at once."""
        return f"{self.namespace}/{self.parent}|{self.hash}"

    def key_at(self, location: PoolLocation, cause: FailureCause) -> LocationKey:
        own = "" if cause in SHARED_CAUSES else self.request
        return location, self.machine_type, self.nodes, self.reservation, own


class RequestBackoff:
    def __init__(self) -> None:
        self._locations: dict[LocationKey, FailedRequest] = {}
        self._pools: dict[str, FailedRequest] = {}
        # By pool and its status: GKE refuses to delete a pool that it is creating or upgrading, and
        # accepts it as soon as that is over.
        self._deletions: dict[tuple[str, str], FailedRequest] = {}

    def failure_at(self, spec: PoolSpec, location: PoolLocation) -> FailedRequest | None:
        if not self._locations:
            return None
        kind = PoolKind.of_spec(spec)
        keys = {kind.key_at(location, cause) for cause in FailureCause}
        failed = [self._locations[key] for key in keys if key in self._locations]
        return max(failed, key=lambda one: one.retry_at, default=None)

    def failure_of(self, spec: PoolSpec) -> FailedRequest | None:
        return self._pools.get(PoolKind.of_spec(spec).request) if self._pools else None

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
        kind: PoolKind,
        failure: PoolFailure,
        now: datetime,
    ) -> None:
        key = kind.key_at(location, failure.cause)
        backoff = _BY_CAUSE.get(failure.cause, CAPACITY_BACKOFF)
        failed = _failed(self._locations.get(key), failure, backoff, now, key=str(key))
        self._locations[key] = replace(failed, namespace=kind.namespace)

    def record_pool_failure(self, spec: PoolSpec, failure: PoolFailure, now: datetime) -> None:
        key = PoolKind.of_spec(spec).request
        transient = failure.cause is FailureCause.TRANSIENT
        backoff = BUSY_BACKOFF if transient else _BY_CAUSE.get(failure.cause, CAPACITY_BACKOFF)
        self._pools[key] = _failed(self._pools.get(key), failure, backoff, now, key=key)

    @property
    def misfits(self) -> dict[str, list[Any]]:
        """As JSON values. They outlive the provisioner: each try costs a pool for some minutes."""
        return {
            request: [one.failures, one.retry_at.isoformat(), one.failure.message]
            for request, one in self._pools.items()
            if one.failure.cause is FailureCause.POD_MISFIT
        }

    def restore_misfits(self, misfits: Mapping[str, Sequence[Any]]) -> None:
        for request, (failures, retry_at, message) in misfits.items():
            failure = PoolFailure(FailureCause.POD_MISFIT, str(message))
            one = FailedRequest(failure, int(failures), datetime.fromisoformat(retry_at))
            self._pools.setdefault(request, one)

    def clear_location(self, location: PoolLocation, spec: PoolSpec) -> None:
        for cause in FailureCause:
            self._locations.pop(PoolKind.of_spec(spec).key_at(location, cause), None)

    def expire_before(self, moment: datetime) -> None:
        """Forget failures whose wait ended before `moment`, so that the memory stays bounded."""
        self._locations = _since(self._locations, moment)
        self._pools = _since(self._pools, moment)
        self._deletions = _since(self._deletions, moment)


def _without_project(reservation: str) -> str:
    """GKE may list it with its project."""
    try:
        return str(compute_reservations.parse(reservation).without_project())
    except BadInput:
        return reservation


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
