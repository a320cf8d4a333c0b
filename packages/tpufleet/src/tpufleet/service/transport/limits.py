"""What one caller can take of a server: requests in a time, worker threads in groups that do not
wait for each other, and requests at a time, so that one user cannot take all threads, or all memory
with large responses that they do not receive. A proxy does not know users, so it cannot do this."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeVar, TypeVarTuple

from starlette.types import Message, Send

from tpufleet.errors import Unreachable
from tpufleet.policy.accounting import rate_limits
from tpufleet.policy.accounting.rate_limits import ConcurrencyLimit, RateLimit, TokenBucket

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

RETRY_AFTER = timedelta(seconds=5)
_MAX_REMEMBERED = 100_000
_VALID_FOR = timedelta(minutes=10)
# Larger bodies are sent in parts of this size: uvicorn waits for the client between two of them.
PART_BYTES = 64 * 1024
# For a part. A person who reads a response in a pager may take a while.
PART_TIMEOUT = timedelta(minutes=10)


class BoundedDict(OrderedDict[K, V]):
    """Forgets what was written longest ago."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)


def monotonic_now() -> datetime:
    """Not the time of day: a clock step must neither block callers nor free them."""
    return datetime.fromtimestamp(time.monotonic(), UTC)


class TooManyRequests(Unreachable):
    """The caller sends more requests than its limit."""

    def __init__(self, message: str, retry_after: timedelta = RETRY_AFTER) -> None:
        self.retry_after_seconds = max(1, math.ceil(retry_after.total_seconds()))
        super().__init__(f"{message}; retry in {self.retry_after_seconds} s")


class RateLimiter:
    """Used in the event loop only. The least recently used callers are forgotten first."""

    def __init__(self, now: Callable[[], datetime] = monotonic_now) -> None:
        self._now = now
        self._buckets = BoundedDict[str, TokenBucket](_MAX_REMEMBERED)
        self._valid = BoundedDict[str, datetime](_MAX_REMEMBERED)  # token hash → last accepted

    def check_caller(self, caller: str, limit: RateLimit) -> None:
        """Before a request of this caller is handled."""
        key = f"caller:{caller}"
        self._buckets[key], wait = rate_limits.take(self._buckets.get(key), limit, self._now())
        if wait is not None:
            raise TooManyRequests("too many requests", wait)

    def check_address(self, address: str, token_hash: str) -> None:
        """Before a token is looked up: strangers must not keep the database busy. A token that was
        valid a moment ago is let through, whoever else uses the same address."""
        last, now = self._valid.get(token_hash), self._now()
        if last is not None and now - last <= _VALID_FOR:
            return
        bucket = self._buckets.get(f"address:{address}")
        if bucket is not None:
            _, wait = rate_limits.take(bucket, rate_limits.PER_STRANGER, now)
            if wait is not None:
                raise TooManyRequests(
                    f"too many requests without a valid token from {address}", wait
                )

    def accept(self, token_hash: str) -> None:
        self._valid[token_hash] = self._now()

    def reject(self, address: str, token_hash: str) -> None:
        """A request without a valid token was received from this address."""
        self._valid.pop(token_hash, None)
        key = f"address:{address}"
        bucket, _ = rate_limits.take(self._buckets.get(key), rate_limits.PER_STRANGER, self._now())
        self._buckets[key] = bucket


class WorkerThreads:
    """Runs at most `count` functions at a time; others wait in order."""

    def __init__(self, name: str, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, function: Callable[[*Arguments], T], *args: *Arguments) -> T:
        context = copy_context()
        call = self._threads.submit(lambda: context.run(function, *args))
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            # What began ends before the next thing happens, such as the last write at shutdown.
            if not call.cancelled():
                await asyncio.wait([asyncio.wrap_future(call)])
            raise


USERS = WorkerThreads("users", 40)  # more than one user can take: see CONCURRENT_PER_USER
AGENTS = WorkerThreads("agents", 40)
HEARTBEATS = WorkerThreads("heartbeats", 8)  # each reads or writes many of them at once
AUTHENTICATION = WorkerThreads("authentication", 16)
PROBES = WorkerThreads("probes", 2)


@dataclass(slots=True)
class _Caller:
    running: asyncio.Semaphore
    requests: int = 0  # that run or wait
    downloads: int = 0


class RequestSlots:
    """How many requests of each caller run at a time. Used in the event loop only."""

    def __init__(self, limit: ConcurrencyLimit) -> None:
        self._limit = limit
        self._callers: dict[str, _Caller] = {}

    async def acquire(self, name: str) -> None:
        """Waits, in order of arrival, while too many are running. Raises TooManyRequests."""
        caller = self._caller(name)
        if caller.requests >= self._limit.running + self._limit.waiting:
            raise self._too_many()
        caller.requests += 1
        try:
            async with asyncio.timeout(self._limit.wait.total_seconds()):
                await caller.running.acquire()
        except BaseException as error:
            caller.requests -= 1
            self._forget_if_idle(name)
            if isinstance(error, TimeoutError):
                raise self._too_many() from error
            raise

    def release(self, name: str) -> None:
        caller = self._callers[name]
        caller.running.release()
        caller.requests -= 1
        self._forget_if_idle(name)

    def start_download(self, name: str) -> None:
        caller = self._caller(name)
        if caller.downloads >= self._limit.downloads:
            raise TooManyRequests(f"{self._limit.downloads} downloads are open")
        caller.downloads += 1

    def end_download(self, name: str) -> None:
        self._callers[name].downloads -= 1
        self._forget_if_idle(name)

    def _caller(self, name: str) -> _Caller:
        known = self._callers.get(name)
        if known is None:
            known = self._callers[name] = _Caller(asyncio.Semaphore(self._limit.running))
        return known

    def _forget_if_idle(self, name: str) -> None:
        if not self._callers[name].requests and not self._callers[name].downloads:
            del self._callers[name]

    def _too_many(self) -> TooManyRequests:
        message = f"{self._limit.running} of your requests are running, as many as may at a time"
        return TooManyRequests(message)


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


def in_parts(send: Send) -> Send:
    """Returns when the client has received all but the last part, so that a slot is held as long
    as the response is in memory. Raises TimeoutError when the client stops receiving."""

    async def send_part(message: Message) -> None:
        async with asyncio.timeout(PART_TIMEOUT.total_seconds()):
            await send(message)

    async def send_all(message: Message) -> None:
        body = message.get("body", b"")
        for start in range(0, len(body) - PART_BYTES, PART_BYTES):
            part = body[start : start + PART_BYTES]
            await send_part({**message, "body": part, "more_body": True})
        rest = body[(len(body) - 1) // PART_BYTES * PART_BYTES :] if body else body
        await send_part({**message, "body": rest} if "body" in message else message)

    return send_all
