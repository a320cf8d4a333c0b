"""Lists node pools without waiting for a call that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

from tpufleet.errors import ProviderUnavailable
from tpufleet_gke.provisioner.model.cluster_state import ObservedPool

MAX_IN_FLIGHT = 4
# An older listing is not used: too much may have changed since it was started.
MAX_AGE = 30.0  # seconds


class PoolListing:
    """Each round starts a new call. If that takes too long, the result of an earlier one that was
    too slow for its round is used, so that listings that are always slow still serve."""

    def __init__(
        self,
        list_pools: Callable[[], Sequence[ObservedPool]],
        timeout: timedelta,
    ) -> None:
        self._list_pools = list_pools
        self._executor = ThreadPoolExecutor(MAX_IN_FLIGHT, thread_name_prefix="list")
        self._timeout = timeout.total_seconds()
        self._calls: list[tuple[float, Future[Sequence[ObservedPool]]]] = []  # oldest first

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def fetch(self) -> Sequence[ObservedPool]:
        """Raises ProviderUnavailable when no listing is current."""
        now = time.monotonic()
        self._calls = [
            (started, call)
            for started, call in self._calls
            if not call.done() or now - started < MAX_AGE
        ]
        if sum(not call.done() for _, call in self._calls) < MAX_IN_FLIGHT:
            latest = self._executor.submit(self._list_pools)
            self._calls.append((now, latest))
        else:
            latest = self._calls[-1][1]
        try:
            pools = latest.result(self._timeout)
        except TimeoutError as error:
            earlier = [call for _, call in self._calls if call.done()]
            if earlier and earlier[-1].exception() is None:
                self._calls = [one for one in self._calls if not one[1].done()]
                return earlier[-1].result()
            raise ProviderUnavailable(
                f"GKE has not listed its node pools within {self._timeout:g} s"
            ) from error
        finally:
            if latest.done():
                self._calls = [one for one in self._calls if not one[1].done()]
        return pools
