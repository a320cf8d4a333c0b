"""Worker threads in groups that do not wait for each other: slow requests of users delay neither
authentication nor probes nor agents."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class WorkerThreads:
    """Runs at most `count` functions at a time in each event loop; others wait in order."""

    def __init__(self, name: str, count: int) -> None:
        self._count = count
        self._limiter: RunVar[anyio.CapacityLimiter] = RunVar(f"tpufleet.{name}")

    async def run(self, function: Callable[[*Arguments], T], *args: *Arguments) -> T:
        try:
            limiter = self._limiter.get()
        except LookupError:
            limiter = anyio.CapacityLimiter(self._count)
            self._limiter.set(limiter)
        return await anyio.to_thread.run_sync(function, *args, limiter=limiter)


USERS = WorkerThreads("users", 40)  # more than one user can take: see CONCURRENT_PER_USER
AGENTS = WorkerThreads("agents", 40)
HEARTBEATS = WorkerThreads("heartbeats", 8)  # each reads or writes many of them at once
AUTHENTICATION = WorkerThreads("authentication", 16)
PROBES = WorkerThreads("probes", 2)
