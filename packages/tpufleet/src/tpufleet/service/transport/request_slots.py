"""How many requests of one caller run at a time, so that one user cannot take all worker threads,
or all memory with large responses."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from datetime import timedelta

from tpufleet.policy.accounting.rate_limits import ConcurrencyLimit
from tpufleet.service.transport.rate_limiter import TooManyRequests

RETRY_AFTER = timedelta(seconds=5)


class RequestSlots:
    """Of all callers. Used in the event loop only."""

    def __init__(self, limit: ConcurrencyLimit) -> None:
        self._limit = limit
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._downloads: Counter[str] = Counter()

    async def acquire(self, caller: str) -> None:
        """Waits, in order of arrival, while too many are running. Raises TooManyRequests."""
        if self._running[caller] < self._limit.running:
            self._running[caller] += 1
            return
        waiting = self._waiting.setdefault(caller, deque())
        if len(waiting) >= self._limit.waiting:
            raise self._too_many()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await asyncio.wait([turn], timeout=self._limit.wait.total_seconds())
        except asyncio.CancelledError:
            if turn.done():
                self.release(caller)
            else:
                self._give_up(caller, turn)
            raise
        if not turn.done():
            self._give_up(caller, turn)
            raise self._too_many()

    def release(self, caller: str) -> None:
        waiting = self._waiting.get(caller)
        if waiting:
            waiting.popleft().set_result(None)  # the slot is passed on
            self._forget_if_empty(caller)
        else:
            _decrease(self._running, caller)

    def start_download(self, caller: str) -> None:
        if self._downloads[caller] >= self._limit.downloads:
            raise TooManyRequests(f"{self._limit.downloads} downloads are open", RETRY_AFTER)
        self._downloads[caller] += 1

    def end_download(self, caller: str) -> None:
        _decrease(self._downloads, caller)

    def _give_up(self, caller: str, turn: asyncio.Future[None]) -> None:
        self._waiting[caller].remove(turn)
        self._forget_if_empty(caller)

    def _forget_if_empty(self, caller: str) -> None:
        if not self._waiting[caller]:
            del self._waiting[caller]

    def _too_many(self) -> TooManyRequests:
        message = f"{self._limit.running} of your requests are running, as many as may at a time"
        return TooManyRequests(message, RETRY_AFTER)


class RequestSlot:
    """The slot of one request."""

    def __init__(self, slots: RequestSlots, caller: str) -> None:
        self._slots = slots
        self._caller = caller
        self.held = False
        self._downloading = False

    async def acquire(self) -> None:
        await self._slots.acquire(self._caller)
        self.held = True

    def release(self) -> None:
        if self.held:
            self.held = False
            self._slots.release(self._caller)

    def become_download(self) -> None:
        """The response is read from the disk while the client takes it, so it needs no memory, and
        may take as long as it likes. Raises TooManyRequests."""
        self._slots.start_download(self._caller)
        self._downloading = True
        self.release()

    def close(self) -> None:
        """At the end of the request."""
        self.release()
        if self._downloading:
            self._downloading = False
            self._slots.end_download(self._caller)


def _decrease(counts: Counter[str], caller: str) -> None:
    counts[caller] -= 1
    if not counts[caller]:
        del counts[caller]
