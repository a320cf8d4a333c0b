"""Server-sent events: nothing lost or repeated, whoever goes away."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.service.harness import ServiceHarness, until
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import NotFound, Unreachable
from tpufleet.model.api_types import JobRow
from tpufleet.model.events import Event, EventKind
from tpufleet.model.hosts import Progress
from tpufleet.model.jobs import JobId, JobState
from tpufleet.service.http_server import SHUTDOWN_GRACE_SECONDS
from tpufleet.stores.base import ChangeSet


def write(world: ServiceHarness, *words: str, job_id: str | None = None) -> None:
    events = [
        Event(
            at=world.clock.now(),
            kind=EventKind.JOB if job_id else EventKind.POOL,
            state="running",
            message=each,
            job_id=JobId(job_id) if job_id else None,
        )
        for each in words
    ]
    world.store.commit(ChangeSet(events=events))


class Listener:
    """Gathers what a stream tells, in a thread of its own."""

    def __init__(self, client: FleetClient, **params) -> None:
        self.told: list[Event | JobRow] = []
        self._stream = client.stream(**params)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for item in self._stream:
            self.told.append(item)

    @property
    def words(self) -> list[str]:
        return [item.message for item in self.told if isinstance(item, Event)]

    @property
    def rows(self) -> list[JobRow]:
        return [item for item in self.told if isinstance(item, JobRow)]


def listen(world: ServiceHarness, **params) -> Listener:
    quick = world.client("vic", sleep=lambda _: threading.Event().wait(0.02))
    listener = Listener(quick, **params)
    until(lambda: world.app.state.hub.streams > 0)
    return listener


def test_a_stream_tells_events_as_they_happen_whoever_committed_them(world):
    listener = listen(world, after=0)
    world.submit("job-1")
    write(world, "the controller woke up")
    until(lambda: len(listener.words) == 2)
    assert listener.words == ["mel submitted it", "the controller woke up"]
    assert listener.rows[0].id == "job-1"


def test_a_stream_begins_after_the_event_that_it_is_told(world):
    write(world, "one", "two", "three")
    listener = listen(world, after=1)
    until(lambda: len(listener.words) == 2)
    assert listener.words == ["two", "three"]


def test_a_stream_without_a_beginning_tells_what_is_new(world):
    write(world, "old")
    listener = listen(world)

    def heard() -> bool:
        write(world, "new")  # again: the first may come before the stream has begun
        return bool(listener.words)

    until(heard)
    assert set(listener.words) == {"new"}


def test_a_stream_goes_on_over_restarts_without_loss_or_repeat(world):
    listener = listen(world, after=0)
    expected = []
    for number in range(4):
        words = [f"{number} before", f"{number} down", f"{number} after"]
        write(world, words[0])
        world.stop()
        write(world, words[1])
        world.start()
        write(world, words[2])
        expected += words
    until(lambda: len(listener.words) >= len(expected))
    assert listener.words == expected


def test_many_events_come_in_order_and_each_once(world):
    listener = listen(world, after=0)
    expected = [f"event {number}" for number in range(2300)]
    for at in range(0, len(expected), 700):
        write(world, *expected[at : at + 700])
    until(lambda: len(listener.words) >= len(expected))
    assert listener.words == expected


def test_a_stream_about_one_job_tells_its_state_and_progress_only(world):
    world.submit("job-1")
    world.submit("job-2")
    world.slice("s1", "job-1")
    world.attempt("job-1", 0, "s1")
    listener = listen(world, job="job-1", after=0)
    write(world, "other", job_id="job-2")
    world.change_job("job-1", state=JobState.RUNNING)
    world.beat("s1/0", attempt_id="job-1.0", progress=Progress(step=7))
    until(lambda: listener.rows and listener.rows[-1].progress is not None)
    assert listener.rows[-1].progress.step == 7
    assert listener.rows[-1].state is JobState.RUNNING
    assert listener.words == ["mel submitted it"]
    assert {row.id for row in listener.rows} == {"job-1"}


def test_a_row_comes_before_the_event_so_that_whoever_has_the_event_has_the_row(world):
    world.submit("job-1")
    listener = listen(world, after=0)
    until(lambda: listener.words)
    assert isinstance(listener.told[0], JobRow)


def test_a_client_that_reads_nothing_holds_up_nobody(world):
    request = (
        f"GET /api/v1/stream?after=0 HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {world.tokens['vic']}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", world.port)) as asleep:
        asleep.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asleep.sendall(request.encode())
        until(lambda: world.app.state.hub.streams == 1)
        for _ in range(20):
            write(world, *("x" * 5000 for _ in range(50)))
        listener = listen(world, after=0)
        until(lambda: len(listener.words) == 1000)
        assert world.client("vic").me().name == "vic"
        assert world.app.state.hub.streams == 2
    until(lambda: world.app.state.hub.streams == 1)


def test_a_shutdown_does_not_wait_for_streams(world):
    for _ in range(3):
        listen(world)
    until(lambda: world.app.state.hub.streams == 3)
    assert world.stop() < SHUTDOWN_GRACE_SECONDS
    world.start()


def test_a_stream_of_a_job_that_is_not_there_says_so(world):
    with pytest.raises(NotFound):
        next(world.client("vic").stream("nothing"))


def test_a_stream_gives_up_when_its_patience_ends(world):
    waited: list[float] = []
    client = world.client("vic", reconnect_timeout=20, sleep=waited.append)
    stream = client.stream(after=0)
    write(world, "one")
    assert next(stream).words == "one"
    world.stop()
    with pytest.raises(Unreachable, match=rf"127.0.0.1:{world.port}.*tpu serve"):
        next(stream)
    assert 20 <= sum(waited) < 40
    world.start()
