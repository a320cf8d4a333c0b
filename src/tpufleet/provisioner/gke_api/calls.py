"""Calls to GKE that are under way, each in a thread. No round waits for them: the next takes in
their answers, so that a call that hangs holds up nobody else's pool."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from datetime import datetime

from tpufleet.provisioner.planning.cluster_state import ClusterState, PendingPool
from tpufleet.provisioner.planning.plans import CreatePool, DeletePool

# Deletions are not to wait for each other either; creations are bounded by CONCURRENCY, as of old.
MAX_CONCURRENT_DELETES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class GkeCall:
    action: CreatePool | DeletePool
    started_at: datetime
    state: ClusterState  # as it was when the call was decided on
    node_name: str | None = None  # of the pool that is to be deleted

    @property
    def pool_name(self) -> str:
        return (
            self.action.pool_name if isinstance(self.action, CreatePool) else self.action.pool.name
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GkeCallResult:
    call: GkeCall
    error: Exception | None = None
    sent: bool = True  # False: it turned out that there was no need


class InFlightCalls:
    """All but the calls themselves happens in the thread of the rounds."""

    def __init__(self, creator: Executor, deleter: Executor, ended: Callable[[], None]) -> None:
        self._creator, self._deleter, self._ended = creator, deleter, ended
        self._under_way: dict[tuple[type, str], tuple[GkeCall, Future[None]]] = {}
        self._answers: queue.SimpleQueue[GkeCallResult] = queue.SimpleQueue()

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def start(self, call: GkeCall, make: Callable[[], bool]) -> None:
        """Unless the same is under way. A pool that is being deleted is not made meanwhile."""
        creates = isinstance(call.action, CreatePool)
        kinds = (CreatePool, DeletePool) if creates else (DeletePool,)
        if any((kind, call.pool_name) in self._under_way for kind in kinds):
            return
        executor = self._creator if creates else self._deleter
        future = executor.submit(self._make, call, make)
        self._under_way[type(call.action), call.pool_name] = (call, future)

    def take_results(self) -> list[GkeCallResult]:
        """Of the calls that ended since the last look."""
        found: list[GkeCallResult] = []
        while not self._answers.empty():
            answer = self._answers.get()
            del self._under_way[type(answer.call.action), answer.call.pool_name]
            found.append(answer)
        return found

    def wait(self, timeout: float) -> None:
        wait([future for _, future in self._under_way.values()], timeout)

    @property
    def creating(self) -> dict[str, PendingPool]:
        calls = [call for call, _ in self._under_way.values()]
        return {
            call.pool_name: call.action.pending_pool
            for call in calls
            if isinstance(call.action, CreatePool)
        }

    @property
    def deleting(self) -> frozenset[str]:
        return frozenset(name for kind, name in self._under_way if kind is DeletePool)

    def _make(self, call: GkeCall, make: Callable[[], bool]) -> None:
        try:
            answer = GkeCallResult(call=call, sent=make())
        except Exception as error:  # it is for the round to tell; this thread has others to serve
            answer = GkeCallResult(call=call, error=error)
        self._answers.put(answer)
        self._ended()
