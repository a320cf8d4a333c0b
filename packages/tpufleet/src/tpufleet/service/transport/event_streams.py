"""Server-sent events: one hub that wakes all streams, and a response that ends when the client
disconnects or the server shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tpufleet.errors import Unauthorized, must_be
from tpufleet.model.api_types import JobRow
from tpufleet.model.job.jobs import Job, JobId
from tpufleet.model.values.encoding import to_json
from tpufleet.service.jobs import queries
from tpufleet.service.operations.background import log_failure
from tpufleet.service.transport.limits import AUTHENTICATION, BoundedDict, TooManyRequests
from tpufleet.stores.base import EventQuery, Store, Subscription

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # how soon events of another server are noticed without a notification
NOTIFIED_POLL_SECONDS = 15.0  # while the database announces them
MIN_POLL_SECONDS = 0.02  # at most one query in this time, however often the hub is notified
KEEP_ALIVE_SECONDS = 2.0  # also how often the token of an open stream is checked
# Each of one job reads the database every second, and each of a log four times. A page has two.
MAX_STREAMS_PER_USER = 200
KEEP_ALIVE = b": keep-alive\n\n"
_BATCH_SIZE = 500
_KEPT_BATCHES = 16  # streams that lag behind differ by few


class EventHub:
    """Tracks the sequence number of the newest event, and wakes the streams when it grows."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._loop: asyncio.AbstractEventLoop | None = None
        self._subscription: Subscription | None = None
        self._notified = asyncio.Event()
        self._advanced = asyncio.Event()
        self.closed = asyncio.Event()
        self.latest_event = 0
        self.streams_by_caller: Counter[str] = Counter()  # open now
        self.batches = ChangeBatches(store)

    def notify(self) -> None:
        """There may be new events. Safe from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._notified.set)

    def close(self) -> None:
        """End all streams. Call it in the event loop."""
        self.closed.set()
        self._wake_streams()

    def follow(self, subscription: Subscription) -> None:
        """The database announces events, by `notify`, while this is connected."""
        self._subscription = subscription

    async def watch(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not self.closed.is_set():
            self._notified.clear()
            try:
                newest = await asyncio.to_thread(self._store.last_event)
                if newest > self.latest_event:
                    self.latest_event = newest
                    self._wake_streams()
            except Exception as error:
                log_failure(logger, "read the newest event", error)
            await asyncio.sleep(MIN_POLL_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._notified.wait(), self._poll_seconds())

    def _poll_seconds(self) -> float:
        announced = self._subscription is not None and self._subscription.connected
        return NOTIFIED_POLL_SECONDS if announced else POLL_SECONDS

    async def wait(self, after: int, seconds: float) -> None:
        """Until there are events after this number, the hub closes, or the time is up."""
        advanced = self._advanced
        if self.latest_event > after or self.closed.is_set():
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(advanced.wait(), seconds)

    async def pause(self, seconds: float) -> None:
        """For this long, or until the hub closes."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.closed.wait(), seconds)

    def _wake_streams(self) -> None:
        advanced, self._advanced = self._advanced, asyncio.Event()
        advanced.set()


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """Events after some number, preceded by the rows of their jobs, as bytes to send."""

    chunk: bytes
    cursor: int  # of the last event
    more: bool  # there are more than fit into one batch


class ChangeBatches:
    """Reads each batch once, for all streams of the whole fleet: they wait at the same event."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tasks = BoundedDict[tuple[int, int], asyncio.Task[ChangeBatch]](_KEPT_BATCHES)

    async def after(self, cursor: int, latest: int) -> ChangeBatch:
        """`latest`: number of the newest event, so that nothing read before it is used."""
        key = (cursor, latest)
        task = self._tasks.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(asyncio.to_thread(_read_batch, self._store, cursor))
            self._tasks[key] = task
        return await asyncio.shield(task)  # a stream that ends must not end it for the others


def _read_batch(store: Store, cursor: int) -> ChangeBatch:
    events = store.events(EventQuery(after=cursor, limit=_BATCH_SIZE))
    rows = _rows(store, {event.job_id for event in events if event.job_id is not None})
    chunks = [sse_message("job", row) for row in rows]
    chunks += [sse_message("event", event, event.seq) for event in events]
    return ChangeBatch(
        b"".join(chunks), events[-1].seq if events else cursor, len(events) == _BATCH_SIZE
    )


class EventStream(StreamingResponse):
    """Ends when the client disconnects, or the caller's token is revoked or expires: it may be open
    for days."""

    media_type = "text/event-stream"

    def __init__(
        self,
        hub: EventHub,
        chunks: AsyncGenerator[bytes],
        check_caller: Callable[[], object],
        caller: str,
    ) -> None:
        if hub.streams_by_caller[caller] >= MAX_STREAMS_PER_USER:
            raise TooManyRequests(f"{MAX_STREAMS_PER_USER} streams are open")
        self._hub, self._caller, self._chunks = hub, caller, chunks
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(_while_allowed(chunks, check_caller), headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._hub.streams_by_caller[self._caller] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._hub.streams_by_caller -= Counter({self._caller: 1})  # leaves out those with none
            await self._chunks.aclose()


async def _while_allowed(
    chunks: AsyncIterator[bytes], check_caller: Callable[[], object]
) -> AsyncIterator[bytes]:
    """The caller is checked when there is a chunk, which idle streams have too."""
    clock = asyncio.get_running_loop().time
    checked_at = clock()
    try:
        async for chunk in chunks:
            if clock() - checked_at >= KEEP_ALIVE_SECONDS:
                await AUTHENTICATION.run(check_caller)
                checked_at = clock()
            yield chunk
    except Unauthorized:
        return
    except Exception as error:
        # The client reconnects with the last event id that it received.
        log_failure(logger, "continue an event stream", error)


def sse_message(kind: str, value: object, event_id: str | int | None = None) -> bytes:
    head = f"event: {kind}\n" if event_id is None else f"id: {event_id}\nevent: {kind}\n"
    return head.encode() + b"data: " + to_json(value) + b"\n\n"


async def stream_changes(
    hub: EventHub, store: Store, after: int | None, job_id: JobId | None
) -> AsyncGenerator[bytes]:
    """Every event after this number (None: from now on), each batch preceded by its jobs' rows. The
    stream of one job also sends its row when its progress changes."""
    cursor = after if after is not None else await asyncio.to_thread(store.last_event)
    # With an id, a client that is disconnected before the first event misses none.
    yield f"retry: 1000\nid: {cursor}\n: connected\n\n".encode()
    changes = (
        _stream_fleet(hub, cursor) if job_id is None else _stream_job(hub, store, cursor, job_id)
    )
    async for chunk in changes:
        yield chunk


async def _stream_fleet(hub: EventHub, cursor: int) -> AsyncIterator[bytes]:
    while not hub.closed.is_set():
        latest = hub.latest_event
        batch = await hub.batches.after(cursor, latest)
        if batch.chunk:
            yield batch.chunk
        cursor = batch.cursor
        if batch.more:
            continue
        seen = max(latest, cursor)
        await hub.wait(seen, KEEP_ALIVE_SECONDS)
        if hub.latest_event <= seen:
            yield KEEP_ALIVE


async def _stream_job(
    hub: EventHub, store: Store, cursor: int, job_id: JobId
) -> AsyncIterator[bytes]:
    last_row: JobRow | None = None
    idle_seconds = 0.0
    while not hub.closed.is_set():
        latest = hub.latest_event
        query = EventQuery(after=cursor, job_id=job_id, limit=_BATCH_SIZE)
        events = await asyncio.to_thread(store.events, query)
        rows = await asyncio.to_thread(_rows, store, {job_id})
        rows, last_row = [row for row in rows if row != last_row], rows[0] if rows else None
        if events or rows:
            chunks = [sse_message("job", row) for row in rows]
            chunks += [sse_message("event", event, event.seq) for event in events]
            yield b"".join(chunks)
            idle_seconds = 0.0
        if events:
            cursor = events[-1].seq
            if len(events) == _BATCH_SIZE:
                continue
        await hub.wait(max(latest, cursor), POLL_SECONDS)
        idle_seconds += POLL_SECONDS
        if idle_seconds >= KEEP_ALIVE_SECONDS:
            yield KEEP_ALIVE
            idle_seconds = 0.0


def _rows(store: Store, ids: set[JobId]) -> list[JobRow]:
    jobs: list[Job] = [job for job_id in sorted(ids) if (job := store.job(job_id)) is not None]
    return queries.job_rows(store, jobs)


def parse_last_event_id(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise must_be("the number of an event, such as 120", text, "Last-Event-ID")
    return int(text)
