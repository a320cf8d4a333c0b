"""The bridge itself, with both of its edges in the test's hands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from queue import SimpleQueue

import pytest

pytest.importorskip(
    "google.cloud.firestore", reason="no Firestore client; pip install 'tpufleet[firestore]'"
)

from google.api_core import exceptions
from google.auth.exceptions import RefreshError

from tests.server_process import wait_until
from tpufleet.bridges.firestore.background_tasks import BridgeLimits
from tpufleet.bridges.firestore.bridge import Bridge
from tpufleet.bridges.firestore.collection import DocumentChange, translate_errors
from tpufleet.bridges.firestore.document_state import DocumentDriver, HeldDocument
from tpufleet.bridges.firestore.documents import Document, DocumentClaim
from tpufleet.errors import PermissionMissing, Unreachable
from tpufleet.model.jobs import JobId

AT = datetime(2026, 1, 1, tzinfo=UTC)


def waiting(name: str) -> Document:
    return Document(id=name, path=name, data={"status": "pending"}, created_at=AT, updated_at=AT)


class FakeListener:
    """A listener that dies, or does not, when told to."""

    def __init__(self) -> None:
        self.alive = True

    def close(self) -> None:
        self.alive = False


class FakeCollection:
    """What the bridge asks of Firestore."""

    holder = "us"

    def __init__(self) -> None:
        self.listeners: SimpleQueue[tuple[FakeListener, Callable[[list[DocumentChange]], None]]] = (
            SimpleQueue()
        )

    def write_heartbeat(self) -> None:
        """Always lives."""

    def delete_heartbeat(self) -> None:
        """Nobody is there to take over."""

    def live_bridges(self) -> frozenset[str]:
        return frozenset({self.holder})

    def live_documents(self) -> list[Document]:
        raise Unreachable("looking around is of no use here")

    def listen(self, on_changes: Callable[[list[DocumentChange]], None]) -> FakeListener:
        ears = FakeListener()
        self.listeners.put((ears, on_changes))
        return ears


class FakeDriver:
    """Tells which documents were taken on. The first try at each fails, for a while."""

    def __init__(self) -> None:
        self.taken: SimpleQueue[str] = SimpleQueue()
        self._tried: set[str] = set()

    def claim(self, document_id: str, document: Document) -> HeldDocument:
        if document_id not in self._tried:
            self._tried.add(document_id)
            raise Unreachable("not at once")
        self.taken.put(document_id)
        claim = DocumentClaim(holder="us", fence=0, run_number=0, job_id=JobId(f"fs-{document_id}"))
        return HeldDocument(document=document, claim=claim)

    def advance(self, held: HeldDocument) -> None:
        held.ended = True


class FakeFleet:
    def __init__(self) -> None:
        self._closed = threading.Event()
        self.asked: SimpleQueue[str] = SimpleQueue()

    def stream(self) -> Iterator[object]:
        self.asked.put("what is new?")
        if self.asked.qsize() == 1:
            raise RuntimeError("nobody foresaw this")
        self._closed.wait(60)
        yield from ()

    def close(self) -> None:
        self._closed.set()


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


@pytest.fixture
def bridged(fleet: FakeFleet) -> Iterator[tuple[FakeCollection, FakeDriver]]:
    collection, driver = FakeCollection(), FakeDriver()
    bridge = Bridge(collection, driver, fleet, BridgeLimits(beat=0.1))  # type: ignore[arg-type]
    thread = threading.Thread(target=bridge.run)
    thread.start()
    yield collection, driver
    bridge.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_a_document_that_could_not_be_taken_on_is_tried_again(bridged):
    collection, driver = bridged
    _, tell = collection.listeners.get(timeout=60)
    tell([DocumentChange(id="d1", document=waiting("d1"))])
    assert driver.taken.get(timeout=60) == "d1"


def test_a_listener_that_died_is_replaced_and_what_it_tells_is_heard(bridged):
    collection, driver = bridged
    ears, _ = collection.listeners.get(timeout=60)
    ears.alive = False
    _, tell = collection.listeners.get(timeout=60)
    tell([DocumentChange(id="d2", document=waiting("d2"))])
    assert driver.taken.get(timeout=60) == "d2"


def test_a_bridge_that_stumbles_over_news_of_the_fleet_listens_anew(bridged, fleet):
    wait_until(lambda: fleet.asked.qsize() >= 2, 60, lambda: fleet.asked.qsize())


class FailingCollection:
    """A collection that may not be read any more, though it may be written."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.rejected: list[str] = []

    def claim(self, document_id: str) -> None:
        with translate_errors():
            raise self._error

    def reject(self, document_id: str, fields: object) -> bool:
        self.rejected.append(document_id)
        return True


OURS = {
    "a role is missing": exceptions.PermissionDenied("no"),
    "a token ran out": exceptions.Unauthenticated("no"),
    "a database of another mode": exceptions.FailedPrecondition("no"),
    "credentials that cannot be renewed": RefreshError("no"),
    "a network that is down": exceptions.ServiceUnavailable("no"),
}


@pytest.mark.parametrize("error", OURS.values(), ids=OURS)
def test_no_document_fails_for_what_is_not_its_fault(error):
    collection = FailingCollection(error)
    document = replace(waiting("d"), data={"status": "pending", "code": "1", "challenge_number": 1})
    with pytest.raises((PermissionMissing, Unreachable)):
        DocumentDriver(collection, None, None).claim("d", document)  # type: ignore[arg-type]
    assert collection.rejected == []


def test_a_document_that_firestore_itself_cannot_take_fails():
    collection = FailingCollection(exceptions.InvalidArgument("too large"))
    document = replace(waiting("d"), data={"status": "pending", "code": "1", "challenge_number": 1})
    assert DocumentDriver(collection, None, None).claim("d", document) is None  # type: ignore[arg-type]
    assert collection.rejected == ["d"]
