"""Runs the repacking of uploads: seconds of CPU time each, which must not delay other requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

from tpufleet.service.transport.limits import TooManyRequests

MAX_AT_A_TIME = 2
MAX_UPLOADS_PER_USER = 16  # being received, waiting or repacked

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class RepackQueue:
    """Has threads of its own. Each user has one turn at a time, so that many uploads of one user
    delay those of others by one. Used in the event loop only."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_AT_A_TIME, thread_name_prefix="snapshots")
        self._uploads: Counter[str] = Counter()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.contextmanager
    def upload_of(self, user: str) -> Iterator[None]:
        """While an upload is in progress. Raises TooManyRequests."""
        if self._uploads[user] >= MAX_UPLOADS_PER_USER:
            raise TooManyRequests(f"{MAX_UPLOADS_PER_USER} uploads are in progress")
        self._uploads[user] += 1
        try:
            yield
        finally:
            self._uploads[user] -= 1
            if not self._uploads[user]:
                del self._uploads[user]

    @contextlib.asynccontextmanager
    async def turn_of(self, user: str) -> AsyncIterator[None]:
        """Waits while another upload of this user has its turn."""
        lock = self._turns.setdefault(user, asyncio.Lock())
        async with lock:
            yield

    async def run(self, work: Callable[[*Arguments], T], *args: *Arguments) -> T:
        """In a thread, once one is free."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
