"""Calls to GKE that are under way, each in a thread. No round waits for them: the next takes in
their answers, so that a call that hangs holds up nobody else's pool."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from datetime import datetime

from tpufleet.provisioner.plans import Create, Delete
from tpufleet.provisioner.seen import Asking, World

# Deletions are not to wait for each other either; creations are bounded by CONCURRENCY, as of old.
DELETIONS_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    what: Create | Delete
    at: datetime
    world: World  # as it was when the call was decided on
    node: str | None = None  # of the pool that is to be deleted

    @property
    def pool(self) -> str:
        return self.what.name if isinstance(self.what, Create) else self.what.pool.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    call: Call
    error: Exception | None = None
    made: bool = True  # False: it turned out that there was no need


class Calls:
    """All but the calls themselves happens in the thread of the rounds."""

    def __init__(self, creator: Executor, deleter: Executor, ended: Callable[[], None]) -> None:
        self._creator, self._deleter, self._ended = creator, deleter, ended
        self._under_way: dict[tuple[type, str], tuple[Call, Future[None]]] = {}
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def start(self, call: Call, make: Callable[[], bool]) -> None:
        """Unless the same is under way. A pool that is being deleted is not made meanwhile."""
        creates = isinstance(call.what, Create)
        kinds = (Create, Delete) if creates else (Delete,)
        if any((kind, call.pool) in self._under_way for kind in kinds):
            return
        executor = self._creator if creates else self._deleter
        future = executor.submit(self._make, call, make)
        self._under_way[type(call.what), call.pool] = (call, future)

    def answers(self) -> list[Answer]:
        """Of the calls that ended since the last look."""
        found: list[Answer] = []
        while not self._answers.empty():
            answer = self._answers.get()
            del self._under_way[type(answer.call.what), answer.call.pool]
            found.append(answer)
        return found

    def wait(self, within: float) -> None:
        wait([future for _, future in self._under_way.values()], within)

    @property
    def creating(self) -> dict[str, Asking]:
        calls = [call for call, _ in self._under_way.values()]
        return {call.pool: call.what.asking for call in calls if isinstance(call.what, Create)}

    @property
    def stopping(self) -> frozenset[str]:
        return frozenset(name for kind, name in self._under_way if kind is Delete)

    def _make(self, call: Call, make: Callable[[], bool]) -> None:
        try:
            answer = Answer(call=call, made=make())
        except Exception as error:  # it is for the round to tell; this thread has others to serve
            answer = Answer(call=call, error=error)
        self._answers.put(answer)
        self._ended()
