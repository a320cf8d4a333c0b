"""One user cannot take all worker threads of a server, or its memory with responses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests.polling import wait_until
from tests.service.harness import ServiceHarness
from tpufleet.model.events import Event, EventKind
from tpufleet.policy.accounting import rate_limits
from tpufleet.policy.accounting.rate_limits import ConcurrencyLimit
from tpufleet.service.transport import limits
from tpufleet.service.transport.limits import RequestSlots, TooManyRequests, WorkerThreads
from tpufleet.stores.base import ChangeSet
from tpufleet.stores.memory import MemoryStore

LIMIT = rate_limits.CONCURRENT_PER_USER
SHORT = timedelta(milliseconds=200)
TWO = ConcurrencyLimit(running=2, waiting=2, wait=SHORT, downloads=2)


class SlowPools(MemoryStore):
    """Reading the pools takes until a test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.readers = 0
        self.may_read = threading.Event()
        self._counting = threading.Lock()

    def pools(self) -> Any:
        with self._counting:
            self.readers += 1
        self.may_read.wait(900)
        return super().pools()


@pytest.fixture
def store() -> Iterator[SlowPools]:
    store = SlowPools()
    yield store
    store.may_read.set()


@pytest.fixture
def slow(store: SlowPools, tmp_path) -> Iterator[ServiceHarness]:
    service = ServiceHarness(store, tmp_path)
    service.start()
    yield service
    store.may_read.set()
    service.close()


@contextlib.contextmanager
def slow_requests(service: ServiceHarness, count: int) -> Iterator[list[int]]:
    """The statuses of those that have ended."""
    statuses: list[int] = []

    def get() -> None:
        with service.http(service.tokens["mel"]) as http:
            statuses.append(http.get("/pools").status_code)

    with ThreadPoolExecutor(count) as threads:
        for _ in range(count):
            threads.submit(get)
        try:
            yield statuses
        finally:
            service.store.may_read.set()  # type: ignore[attr-defined]


def test_slow_requests_of_one_user_delay_neither_others_nor_probes_nor_agents(slow, store):
    slow.submit("job-1", by="mo")
    slow.add_slice("s1", "job-1")
    with slow_requests(slow, 60):
        wait_until(lambda: store.readers >= LIMIT.running)
        with slow.http(slow.tokens["mo"]) as http:
            assert http.get("/me", timeout=20).status_code == 200
            slow.clock.advance(timedelta(seconds=3))
            assert http.get(slow.url + "/readyz", timeout=20).status_code == 200
        slow.send_heartbeat("s1/0")
        assert store.readers == LIMIT.running


def test_requests_beyond_the_limit_wait_and_are_then_refused(slow, store):
    slow.stop()
    slow.start(concurrency=replace(TWO, wait=SHORT))
    with slow_requests(slow, 2) as statuses:
        wait_until(lambda: store.readers == 2)
        with slow.http(slow.tokens["mel"]) as http:
            answer = http.get("/me")
            assert answer.status_code == 429 and answer.headers["Retry-After"] == "5"
            assert "2 of your requests are running" in answer.json()["error"]["message"]
            assert http.get("/healthz").status_code != 429
    assert statuses == [200, 200]
    with slow.http(slow.tokens["mel"]) as http:
        assert http.get("/me").status_code == 200


def test_requests_beyond_the_limit_are_answered_when_others_end(slow, store):
    slow.stop()
    slow.start(
        concurrency=ConcurrencyLimit(running=2, waiting=20, wait=60 * SHORT * 5, downloads=2)
    )
    with slow_requests(slow, 10) as statuses:
        wait_until(lambda: store.readers == 2)
        store.may_read.set()
        wait_until(lambda: len(statuses) == 10)
    assert statuses == [200] * 10


def test_an_open_stream_holds_no_slot(service):
    service.stop()
    service.start(concurrency=TWO)
    with service.http(service.tokens["mel"]) as http, ExitStack() as stack:
        for _ in range(5):
            stream = stack.enter_context(http.stream("GET", "/stream"))
            next(stream.iter_lines())
        assert http.get("/me").status_code == 200


def test_slots_are_given_in_order_of_arrival():
    async def run() -> None:
        slots, order = RequestSlots(replace(TWO, wait=timedelta(minutes=5), waiting=5)), []

        async def request(number: int) -> None:
            await slots.acquire("mel")
            order.append(number)

        waiting = [asyncio.create_task(request(number)) for number in range(6)]
        await asyncio.sleep(0)
        assert order == [0, 1]
        await slots.acquire("mo")  # is not concerned
        waiting[3].cancel()  # its client is gone
        for _ in range(3):
            slots.release("mel")
            await asyncio.sleep(0.01)
        assert order == [0, 1, 2, 4, 5]

    asyncio.run(run())


def test_only_so_many_requests_wait():
    async def run() -> None:
        slots = RequestSlots(replace(TWO, wait=timedelta(minutes=5)))
        tasks = [asyncio.create_task(slots.acquire("mel")) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequests, match="retry in 5 s"):
            await slots.acquire("mel")
        for task in tasks:
            task.cancel()

    asyncio.run(run())


def add_large_events(service: ServiceHarness) -> None:
    """12 MB: more than the system takes for a client that does not read."""
    service.store.commit(
        ChangeSet(
            events=[
                Event(at=service.clock.now(), kind=EventKind.JOB, state="x", message="x" * 120_000)
                for _ in range(100)
            ]
        )
    )


def ask(service: ServiceHarness, *, connection: str = "keep-alive") -> socket.socket:
    """Send a request with a large response, and read nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", service.port))
    client.sendall(large_request(service, connection))
    return client


def large_request(service: ServiceHarness, connection: str = "keep-alive") -> bytes:
    return (
        f"GET /api/v1/events?limit=1000 HTTP/1.1\r\nHost: fleet\r\nConnection: {connection}\r\n"
        f"Authorization: Bearer {service.tokens['vic']}\r\n\r\n"
    ).encode()


def restart(service: ServiceHarness) -> None:
    service.stop()
    service.start(concurrency=TWO)


def status_of_next(service: ServiceHarness) -> int:
    with service.http(service.tokens["vic"]) as http:
        return http.get("/me").status_code


def test_a_response_that_is_not_read_keeps_its_slot(service):
    restart(service)
    add_large_events(service)
    with ask(service) as first, ask(service):
        wait_until(lambda: status_of_next(service) == 429)
        wait_until(lambda: first.recv(4096) != b"")
        first.close()
        wait_until(lambda: status_of_next(service) == 200)


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
def test_a_client_that_reads_nothing_of_a_response_is_disconnected(
    service, connection, monkeypatch
):
    monkeypatch.setattr(limits, "PART_TIMEOUT", timedelta(seconds=0.5))
    restart(service)
    add_large_events(service)
    with ask(service, connection=connection) as client:
        wait_until(lambda: service.server.server_state.tasks)
        wait_until(lambda: not service.server.server_state.tasks)
        client.settimeout(60)
        size = 0
        with contextlib.suppress(ConnectionResetError):
            while chunk := client.recv(2**20):
                size += len(chunk)
        assert size < 12_000_000
    assert status_of_next(service) == 200


def test_downloads_are_limited_apart(service):
    service.submit("job-1", by="mel")
    service.add_slice("s1", "job-1")
    service.add_attempt("job-1", 0, "s1")
    assert service.send_log("job-1.0", "s1/0", 0, (b"x" * 99 + b"\n") * 40_000).status_code == 200
    service.stop()
    service.start(concurrency=TWO)
    with (
        httpx.Client(
            base_url=service.url + "/api/v1",
            headers={"Authorization": f"Bearer {service.tokens['mel']}"},
            transport=httpx.HTTPTransport(
                socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
            ),
            timeout=60,
        ) as http,
        ExitStack() as stack,
    ):
        for _ in range(2):
            stack.enter_context(http.stream("GET", "/jobs/job-1/logs"))
        refused = http.get("/jobs/job-1/logs")
        assert refused.status_code == 429 and "2 downloads are open" in refused.text
        assert http.get("/me").status_code == 200


async def _cancelled_while_it_runs(threads: WorkerThreads) -> list[str]:
    began, may_end = threading.Event(), threading.Event()
    events: list[str] = []

    def write() -> None:
        began.set()
        may_end.wait(10)
        events.append("written")

    task = asyncio.create_task(threads.run(write))
    await asyncio.to_thread(began.wait, 10)
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    events.append("cancelled")
    return events


def test_a_cancelled_call_ends_after_what_its_thread_does() -> None:
    assert asyncio.run(_cancelled_while_it_runs(WorkerThreads("test", 1))) == [
        "written",
        "cancelled",
    ]
