"""Server-sent events: one bell for the whole server, and a response that ends when either side
goes away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tpufleet.errors import NotFound
from tpufleet.model.api_types import JobRow
from tpufleet.model.encoding import to_json
from tpufleet.model.jobs import Job, JobId
from tpufleet.service import queries
from tpufleet.stores.base import EventQuery, Store

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # how soon the events of another server are seen
MIN_POLL_SECONDS = 0.02  # however often the bell rings, the store is asked once in this time
KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b": still here\n\n"
_AT_ONCE = 500


class EventHub:
    """Knows the number of the newest event, and wakes the streams when it grows."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bell = asyncio.Event()
        self._grown = asyncio.Event()
        self.closed = asyncio.Event()
        self.latest_event = 0
        self.open_streams = 0  # open now

    def notify(self) -> None:
        """There may be new events. From any thread, at any time."""
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop closed in this very moment
                self._loop.call_soon_threadsafe(self._bell.set)

    def close(self) -> None:
        """End every stream. From the loop's own thread."""
        self.closed.set()
        self._wake_streams()

    async def watch(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not self.closed.is_set():
            self._bell.clear()
            try:
                newest = await asyncio.to_thread(self._store.last_event)
                if newest > self.latest_event:
                    self.latest_event = newest
                    self._wake_streams()
            except Exception:
                logger.exception("the newest event cannot be read; trying again")
            await asyncio.sleep(MIN_POLL_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._bell.wait(), POLL_SECONDS)

    async def wait(self, beyond: int, seconds: float) -> None:
        """Until there are events beyond this number, the server closes, or time is up."""
        grown = self._grown
        if self.latest_event > beyond or self.closed.is_set():
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(grown.wait(), seconds)

    async def pause(self, seconds: float) -> None:
        """For this long, or until the server closes."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.closed.wait(), seconds)

    def _wake_streams(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


class EventStream(Response):
    """Sends what an iterator yields, and stops the iterator when the client has gone."""

    media_type = "text/event-stream"

    def __init__(self, hub: EventHub, chunks: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._hub = hub
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._hub.open_streams += 1
        pump = asyncio.create_task(self._pump(send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (pump, gone):
                task.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)
            self._hub.open_streams -= 1

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except OSError as error:
            logger.debug("a stream's client went away: %s", error)
            return
        except Exception:
            # The client reconnects and goes on from the last id that it has.
            logger.exception("a stream broke off")
        finally:
            await self._chunks.aclose()  # type: ignore[attr-defined]
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def sse_message(kind: str, value: object, number: str | int | None = None) -> bytes:
    head = f"event: {kind}\n" if number is None else f"id: {number}\nevent: {kind}\n"
    return head.encode() + b"data: " + to_json(value) + b"\n\n"


async def stream_changes(
    hub: EventHub, store: Store, after: int | None, job_id: JobId | None
) -> AsyncIterator[bytes]:
    """Every event after this number (None: from now on), each batch behind the rows of the jobs
    that it is about. A stream about one job also tells its progress."""
    cursor = after if after is not None else await asyncio.to_thread(store.last_event)
    # The id makes a client that loses the connection before the first event miss none.
    yield f"retry: 1000\nid: {cursor}\n: hello\n\n".encode()
    last_row: JobRow | None = None
    patience = KEEP_ALIVE_SECONDS if job_id is None else POLL_SECONDS
    quiet = 0.0
    while not hub.closed.is_set():
        latest = hub.latest_event
        query = EventQuery(after=cursor, job_id=job_id, limit=_AT_ONCE)
        events = await asyncio.to_thread(store.events, query)
        touched = {event.job_id for event in events if event.job_id is not None}
        if job_id is not None:
            touched = {job_id}
        rows = await asyncio.to_thread(_rows, store, touched) if touched else []
        if job_id is not None:
            rows, last_row = [row for row in rows if row != last_row], rows[0] if rows else None
        if events or rows:
            chunks = [sse_message("job", row) for row in rows]
            chunks += [sse_message("event", event, event.seq) for event in events]
            yield b"".join(chunks)
            quiet = 0.0
        if events:
            cursor = events[-1].seq
            if len(events) == _AT_ONCE:
                continue
        await hub.wait(max(latest, cursor), patience)
        quiet += patience
        if quiet >= KEEP_ALIVE_SECONDS:
            yield KEEP_ALIVE
            quiet = 0.0


def _rows(store: Store, ids: set[JobId]) -> list[JobRow]:
    jobs: list[Job] = [job for job_id in sorted(ids) if (job := store.job(job_id)) is not None]
    return queries.job_rows(store, jobs)


def parse_last_event_id(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or len(text) > 18:
        raise NotFound(f"no event has the number {text[:40]!r}")
    return int(text)
