"""The memory of who refused what: what is not asked again at once. Changed by its owner alone."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from tpufleet.policy import retry_delay
from tpufleet.provisioner.gke_api.pool_specs import PoolLocation, PoolSpec
from tpufleet.provisioner.planning.cluster_state import FailureCause

STOCKOUT_FIRST_WAIT = timedelta(seconds=15)
MAX_WAIT = timedelta(minutes=10)
TRANSIENT_FIRST_WAIT = timedelta(seconds=2)
# Somebody has to change a permission or a quota; look again now and then.
PERMANENT_WAIT = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRequest:
    message: str
    retry_at: datetime
    failures: int
    cause: FailureCause


class RequestBackoff:
    def __init__(self) -> None:
        self._places: dict[tuple[str, str, str, int], FailedRequest] = {}
        self._pools: dict[str, FailedRequest] = {}

    def failure_at(self, wanted: PoolSpec, place: PoolLocation) -> FailedRequest | None:
        return self._places.get(_key(place, wanted.shape.machine_type, wanted.shape.nodes))

    def failure_of(self, wanted: PoolSpec) -> FailedRequest | None:
        """Of this very request: it is asked again at once when it changes."""
        return self._pools.get(f"{wanted.name}|{wanted.hash}")

    def record_location_failure(
        self, location: PoolLocation, machine_type: str, nodes: int, *, cause: FailureCause, message: str,
        now: datetime,
    ) -> None:  # fmt: skip
        key = _key(location, machine_type, nodes)
        self._places[key] = _next(self._places.get(key), cause, message, now, str(key))

    def record_pool_failure(
        self, wanted: PoolSpec, cause: FailureCause, message: str, now: datetime
    ) -> None:
        key = f"{wanted.name}|{wanted.hash}"
        self._pools[key] = _next(self._pools.get(key), cause, message, now, key)

    def clear_location(self, place: PoolLocation, machine_type: str, nodes: int) -> None:
        self._places.pop(_key(place, machine_type, nodes), None)

    def expire_before(self, moment: datetime) -> None:
        """What has been over for long: the memory must not grow for ever."""
        for table in (self._places, self._pools):
            for key in [key for key, refusal in table.items() if refusal.retry_at < moment]:
                del table[key]


def _key(place: PoolLocation, machine_type: str, nodes: int) -> tuple[str, str, str, int]:
    return place.zone, place.capacity.value, machine_type, nodes


def _next(
    previous: FailedRequest | None, trouble: FailureCause, words: str, now: datetime, key: str
) -> FailedRequest:
    streak = (previous.failures if previous else 0) + 1
    if trouble in (FailureCause.PERMISSION, FailureCause.INVALID_REQUEST):
        wait = PERMANENT_WAIT
    else:
        first = TRANSIENT_FIRST_WAIT if trouble is FailureCause.TRANSIENT else STOCKOUT_FIRST_WAIT
        wait = retry_delay.retry_delay(streak, initial=first, maximum=MAX_WAIT, key=key)
    return FailedRequest(message=words, retry_at=now + wait, failures=streak, cause=trouble)
