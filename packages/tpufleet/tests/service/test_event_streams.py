"""Server-sent events: nothing lost or repeated, whoever goes away."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.polling import wait_until
from tests.service.harness import ServiceHarness
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import NotFound, Unreachable
from tpufleet.model.api_types import JobRow
from tpufleet.model.events import Event, EventKind
from tpufleet.model.fleet.hosts import Progress
from tpufleet.model.job.jobs import JobId, JobState
from tpufleet.service.transport import event_streams
from tpufleet.service.transport.http_server import SHUTDOWN_GRACE_SECONDS
from tpufleet.stores.base import ChangeSet


def write(service: ServiceHarness, *texts: str, job_id: str | None = None) -> None:
    events = [
        Event(
            at=service.clock.now(),
            kind=EventKind.JOB if job_id else EventKind.POOL,
            state="running",
            message=each,
            job_id=JobId(job_id) if job_id else None,
        )
        for each in texts
    ]
    service.store.commit(ChangeSet(events=events))


class Listener:
    """Gathers what a stream tells, in a thread of its own."""

    def __init__(self, client: FleetClient, **params) -> None:
        self.received: list[Event | JobRow] = []
        self._stream = client.stream(**params)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for item in self._stream:
            self.received.append(item)

    @property
    def messages(self) -> list[str]:
        return [item.message for item in self.received if isinstance(item, Event)]

    @property
    def rows(self) -> list[JobRow]:
        return [item for item in self.received if isinstance(item, JobRow)]


def listen(service: ServiceHarness, **params) -> Listener:
    quick = service.client("vic", sleep=lambda _: threading.Event().wait(0.02))
    listener = Listener(quick, **params)
    wait_until(lambda: service.app.state.hub.streams_by_caller.total() > 0)
    return listener


def test_a_stream_tells_events_as_they_happen_whoever_committed_them(service):
    listener = listen(service, after=0)
    service.submit("job-1")
    write(service, "the controller woke up")
    wait_until(lambda: len(listener.messages) == 2)
    assert listener.messages == ["submitted by mel", "the controller woke up"]
    assert listener.rows[0].id == "job-1"


def test_a_stream_begins_after_the_event_that_it_is_told(service):
    write(service, "one", "two", "three")
    listener = listen(service, after=1)
    wait_until(lambda: len(listener.messages) == 2)
    assert listener.messages == ["two", "three"]


def test_a_stream_without_a_beginning_tells_what_is_new(service):
    write(service, "old")
    listener = listen(service)

    def heard() -> bool:
        write(service, "new")  # again: the first may come before the stream has begun
        return bool(listener.messages)

    wait_until(heard)
    assert set(listener.messages) == {"new"}


def test_a_stream_goes_on_over_restarts_without_loss_or_repeat(service):
    listener = listen(service, after=0)
    expected = []
    for number in range(4):
        texts = [f"{number} before", f"{number} down", f"{number} after"]
        write(service, texts[0])
        service.stop()
        write(service, texts[1])
        service.start()
        write(service, texts[2])
        expected += texts
    wait_until(lambda: len(listener.messages) >= len(expected))
    assert listener.messages == expected


def test_many_events_come_in_order_and_each_once(service):
    listener = listen(service, after=0)
    expected = [f"event {number}" for number in range(2300)]
    for at in range(0, len(expected), 700):
        write(service, *expected[at : at + 700])
    wait_until(lambda: len(listener.messages) >= len(expected))
    assert listener.messages == expected


def test_a_stream_about_one_job_tells_its_state_and_progress_only(service):
    service.submit("job-1")
    service.submit("job-2")
    service.add_slice("s1", "job-1")
    service.add_attempt("job-1", 0, "s1")
    listener = listen(service, job="job-1", after=0)
    write(service, "other", job_id="job-2")
    service.change_job("job-1", state=JobState.RUNNING)
    service.send_heartbeat("s1/0", attempt_id="job-1.0", progress=Progress(step=7))
    wait_until(lambda: listener.rows and listener.rows[-1].progress is not None)
    assert listener.rows[-1].progress.step == 7
    assert listener.rows[-1].state is JobState.RUNNING
    assert listener.messages == ["submitted by mel"]
    assert {row.id for row in listener.rows} == {"job-1"}


def test_a_row_comes_before_the_event_so_that_whoever_has_the_event_has_the_row(service):
    service.submit("job-1")
    listener = listen(service, after=0)
    wait_until(lambda: listener.messages)
    assert isinstance(listener.received[0], JobRow)


def test_a_client_that_reads_nothing_holds_up_nobody(service):
    request = (
        f"GET /api/v1/stream?after=0 HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {service.tokens['vic']}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", service.port)) as asleep:
        asleep.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asleep.sendall(request.encode())
        wait_until(lambda: service.app.state.hub.streams_by_caller.total() == 1)
        for _ in range(20):
            write(service, *("x" * 5000 for _ in range(50)))
        listener = listen(service, after=0)
        wait_until(lambda: len(listener.messages) == 1000)
        assert service.client("vic").me().name == "vic"
        assert service.app.state.hub.streams_by_caller.total() == 2
    wait_until(lambda: service.app.state.hub.streams_by_caller.total() == 1)


def test_a_shutdown_does_not_wait_for_streams(service):
    for _ in range(3):
        listen(service)
    wait_until(lambda: service.app.state.hub.streams_by_caller.total() == 3)
    assert service.stop() < SHUTDOWN_GRACE_SECONDS
    service.start()


def test_a_stream_of_a_job_that_is_not_there_says_so(service):
    with pytest.raises(NotFound):
        next(service.client("vic").stream("nothing"))


def test_a_stream_gives_up_when_its_patience_ends(service):
    waited: list[float] = []
    client = service.client("vic", reconnect_timeout=20, sleep=waited.append)
    stream = client.stream(after=0)
    write(service, "one")
    assert next(stream).message == "one"
    service.stop()
    with pytest.raises(Unreachable, match=rf"127.0.0.1:{service.port}.*tpu serve"):
        next(stream)
    assert 20 <= sum(waited) < 40
    service.start()


def test_a_user_has_a_limited_number_of_open_streams(service):
    """With all tokens together: each of them reads the database."""
    service.submit("job-1", by="mel")
    streams = service.app.state.hub.streams_by_caller
    streams["user:mel"] = event_streams.MAX_STREAMS_PER_USER
    with service.http(service.tokens["mel"]) as http:
        for path in ("/stream", "/stream?job=job-1", "/jobs/job-1/logs/stream"):
            assert http.get(path).status_code == 429
    with service.http(service.tokens["vic"]) as http, http.stream("GET", "/stream") as answer:
        assert answer.status_code == 200
    service.app.state.hub.streams_by_caller["user:mel"] -= 1
    with service.http(service.tokens["mel"]) as http, http.stream("GET", "/stream") as answer:
        assert answer.status_code == 200
