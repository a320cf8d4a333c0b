"""GKE calls in progress, each in a thread. Reconciling never waits for one: the next pass collects
the results, so a call that hangs delays no other pool."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from datetime import datetime

from tpufleet_gke.provisioner.model.cluster_state import ClusterState, PendingPool
from tpufleet_gke.provisioner.planning.pool_plan import CordonPool, CreatePool, DeletePool
from tpufleet_gke.provisioner.planning.warm_pools import AdoptPool

# Creates are bounded by the setting CONCURRENCY, as upstream.
MAX_CONCURRENT_DELETES = 16

PoolAction = CreatePool | DeletePool | AdoptPool | CordonPool


@dataclass(frozen=True, kw_only=True, slots=True)
class GkeCall:
    action: PoolAction
    started_at: datetime
    state: ClusterState  # that the call was decided on
    node_name: str | None = None  # a node of the pool to delete

    @property
    def pool_name(self) -> str:
        if isinstance(self.action, CreatePool):
            return self.action.pool_name
        return self.action.pool.name


@dataclass(frozen=True, kw_only=True, slots=True)
class GkeCallResult:
    call: GkeCall
    error: Exception | None = None
    sent: bool = True  # False when the call turned out to be unnecessary


class InFlightCalls:
    """Only the calls themselves run in threads; all methods belong to the reconciling thread."""

    def __init__(
        self, create_executor: Executor, delete_executor: Executor, on_result: Callable[[], None]
    ) -> None:
        self._create_executor, self._delete_executor = create_executor, delete_executor
        self._on_result = on_result
        self._in_flight: dict[tuple[type, str], tuple[GkeCall, Future[None]]] = {}
        self._results: queue.SimpleQueue[GkeCallResult] = queue.SimpleQueue()

    def __bool__(self) -> bool:
        return bool(self._in_flight)

    def start(self, call: GkeCall, send: Callable[[], bool]) -> None:
        """Unless the same call is in flight. A pool is not created or given away while it is being
        deleted, nor deleted while it is given away or its nodes are changed."""
        conflicting: tuple[type, ...] = (type(call.action), DeletePool)
        if isinstance(call.action, DeletePool):
            conflicting = (DeletePool, AdoptPool, CordonPool)
        if any((kind, call.pool_name) in self._in_flight for kind in conflicting):
            return
        of_deletion = isinstance(call.action, DeletePool | CordonPool)
        executor = self._delete_executor if of_deletion else self._create_executor
        future = executor.submit(self._send, call, send)
        self._in_flight[type(call.action), call.pool_name] = (call, future)

    def take_results(self) -> list[GkeCallResult]:
        """Of the calls that ended since the last time."""
        results: list[GkeCallResult] = []
        while not self._results.empty():
            result = self._results.get()
            del self._in_flight[type(result.call.action), result.call.pool_name]
            results.append(result)
        return results

    def wait(self, timeout: float) -> None:
        wait([future for _, future in self._in_flight.values()], timeout)

    @property
    def creating(self) -> dict[str, PendingPool]:
        calls = [call for call, _ in self._in_flight.values()]
        return {
            call.pool_name: call.action.pending_pool
            for call in calls
            if isinstance(call.action, CreatePool)
        }

    @property
    def adopting(self) -> list[AdoptPool]:
        actions = [call.action for call, _ in self._in_flight.values()]
        return [action for action in actions if isinstance(action, AdoptPool)]

    @property
    def deleting(self) -> frozenset[str]:
        return frozenset(name for kind, name in self._in_flight if kind is DeletePool)

    def _send(self, call: GkeCall, send: Callable[[], bool]) -> None:
        try:
            result = GkeCallResult(call=call, sent=send())
        except Exception as error:  # handled by the reconciling thread
            result = GkeCallResult(call=call, error=error)
        self._results.put(result)
        self._on_result()
