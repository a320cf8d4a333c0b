"""The bridge's main loop, with fakes for Firestore and the server."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import yaml

pytest.importorskip(
    "google.cloud.firestore", reason="no Firestore client; pip install 'tpufleet[firestore]'"
)

from google.api_core import exceptions
from google.auth.exceptions import RefreshError

from tests.repository import ROOT
from tests.server_process import wait_until
from tpufleet.errors import PermissionMissing, Unreachable
from tpufleet.model.job.jobs import JobId, JobState
from tpufleet_firestore.bridge.background_tasks import BridgeLimits
from tpufleet_firestore.bridge.bridge import Bridge, WorkResult
from tpufleet_firestore.bridge.collection import DocumentChange, translate_errors
from tpufleet_firestore.bridge.document_driver import DocumentDriver, HeldDocument
from tpufleet_firestore.bridge.documents import Document, DocumentClaim

AT = datetime(2026, 1, 1, tzinfo=UTC)


def pending(name: str) -> Document:
    data = {"status": "pending"}
    return Document(id=name, path=name, data=data, created_at=AT, updated_at=AT, read_at=AT)


class FakeListener:
    """A listener that tests can kill."""

    def __init__(self) -> None:
        self.is_active = True

    def unsubscribe(self) -> None:
        self.is_active = False


class FakeCollection:
    """Implements what the bridge calls."""

    holder = "us"

    slow_starts = 0  # heartbeats that fail at first

    def __init__(self) -> None:
        self.listeners: SimpleQueue[tuple[FakeListener, Callable[[list[DocumentChange]], None]]] = (
            SimpleQueue()
        )

    def write_heartbeat(self) -> None:
        if self.slow_starts > 0:
            self.slow_starts -= 1
            raise Unreachable("504 Deadline Exceeded")

    def delete_heartbeat(self) -> None:
        """There is no other bridge."""

    def live_bridges(self) -> frozenset[str]:
        return frozenset({self.holder})

    def live_documents(self) -> list[Document]:
        raise Unreachable("resync is not under test")

    def listen(self, on_changes: Callable[[list[DocumentChange]], None]) -> FakeListener:
        listener = FakeListener()
        self.listeners.put((listener, on_changes))
        return listener


class FakeDriver:
    """Records which documents were claimed. The first claim of each fails."""

    def __init__(self) -> None:
        self.claimed: SimpleQueue[str] = SimpleQueue()
        self._attempted: set[str] = set()

    def claim(self, document_id: str, document: Document) -> HeldDocument:
        if document_id not in self._attempted:
            self._attempted.add(document_id)
            raise Unreachable("first attempt")
        self.claimed.put(document_id)
        claim = DocumentClaim(holder="us", fence=0, run_number=0, job_id=JobId(f"fs-{document_id}"))
        return HeldDocument(document=document, claim=claim)

    def advance(self, held: HeldDocument) -> None:
        held.ended = True


class FakeFleet:
    def __init__(self) -> None:
        self._closed = threading.Event()
        self.connects: SimpleQueue[str] = SimpleQueue()

    def stream(self) -> Iterator[object]:
        self.connects.put("stream")
        if self.connects.qsize() == 1:
            raise RuntimeError("unexpected")
        self._closed.wait(900)
        yield from ()

    def close(self) -> None:
        self._closed.set()


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


@contextlib.contextmanager
def running(collection: FakeCollection, driver: FakeDriver, fleet: FakeFleet) -> Iterator[None]:
    bridge = Bridge(collection, driver, fleet, BridgeLimits(heartbeat_seconds=0.1))  # type: ignore[arg-type]
    thread = threading.Thread(target=bridge.run)
    thread.start()
    try:
        yield
    finally:
        bridge.stop()
        thread.join(900)
    assert not thread.is_alive()


@pytest.fixture
def bridged(fleet: FakeFleet) -> Iterator[tuple[FakeCollection, FakeDriver]]:
    collection, driver = FakeCollection(), FakeDriver()
    with running(collection, driver, fleet):
        yield collection, driver


def test_a_firestore_that_is_slow_at_the_start_is_awaited(fleet):
    collection, driver = FakeCollection(), FakeDriver()
    collection.slow_starts = 3
    with running(collection, driver, fleet):
        _, notify = collection.listeners.get(timeout=900)
        assert collection.slow_starts == 0  # no claim before the first heartbeat
        notify([DocumentChange(id="d1", document=pending("d1"))])
        assert driver.claimed.get(timeout=900) == "d1"


class BrokenDriver(FakeDriver):
    """Claims fail in an unexpected way before they succeed."""

    attempts = 0

    def claim(self, document_id: str, document: Document) -> HeldDocument:
        self.attempts += 1
        if self.attempts < 4:
            raise ValueError("Value out of range")
        return super().claim("claimed before", document)


def test_an_unexpected_error_is_logged_once_and_not_at_each_retry(fleet, caplog):
    collection, driver = FakeCollection(), BrokenDriver()
    driver._attempted.add("claimed before")
    with running(collection, driver, fleet):
        _, notify = collection.listeners.get(timeout=900)
        notify([DocumentChange(id="d1", document=pending("d1"))])
        driver.claimed.get(timeout=900)
    failed = [record for record in caplog.records if "d1 failed" in record.getMessage()]
    assert len(failed) == 1 and failed[0].exc_info


def test_a_failed_claim_is_retried(bridged):
    collection, driver = bridged
    _, notify = collection.listeners.get(timeout=900)
    notify([DocumentChange(id="d1", document=pending("d1"))])
    assert driver.claimed.get(timeout=900) == "d1"


def test_a_dead_listener_is_replaced(bridged):
    collection, driver = bridged
    listener, _ = collection.listeners.get(timeout=900)
    listener.is_active = False
    _, notify = collection.listeners.get(timeout=900)
    notify([DocumentChange(id="d2", document=pending("d2"))])
    assert driver.claimed.get(timeout=900) == "d2"


def test_the_stream_of_job_changes_is_reopened_after_an_error(bridged, fleet):
    wait_until(lambda: fleet.connects.qsize() >= 2, 60, lambda: fleet.connects.qsize())


def test_metrics_count_documents_claims_outcomes_and_errors(fleet):
    collection, driver = FakeCollection(), FakeDriver()
    bridge = Bridge(collection, driver, fleet, BridgeLimits(heartbeat_seconds=0.1))  # type: ignore[arg-type]
    thread = threading.Thread(target=bridge.run)
    thread.start()
    try:
        _, notify = collection.listeners.get(timeout=900)
        notify([DocumentChange(id=name, document=pending(name)) for name in ("d1", "d2")])

        def values() -> dict[str, str]:
            lines = bridge.metrics().splitlines()
            return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

        wait_until(lambda: int(values()["tpufleet_bridge_ended_total"]) >= 2, 60, values)
        shown = values()
        assert shown['tpufleet_bridge_documents{status="pending"}'] == "2"
        assert int(shown["tpufleet_bridge_claims_total"]) >= 2
        assert int(shown["tpufleet_bridge_errors_total"]) >= 2, "the first claim of each fails"
        assert shown["tpufleet_bridge_ready"] == "1"
    finally:
        bridge.stop()
        thread.join(900)


def test_failures_quotas_and_long_runs_are_told_apart():
    bridge = Bridge(FakeCollection(), FakeDriver(), FakeFleet(), BridgeLimits())  # type: ignore[arg-type]
    document = pending("d1")
    claim = DocumentClaim(holder="us", fence=0, run_number=0, job_id=JobId("fs-d1"))
    for state in (JobState.FAILED, JobState.SUCCEEDED):
        row = SimpleNamespace(state=state)
        held = HeldDocument(document=document, claim=claim, row=row, ended=True)  # type: ignore[arg-type]
        bridge._in_progress["d1"] = False
        bridge._handle_result(WorkResult("d1", held, None))
    for error in (exceptions.ResourceExhausted("quota"), exceptions.ServiceUnavailable("later")):
        with pytest.raises(Unreachable) as caught, translate_errors():
            raise error
        bridge._handle_error("d1", caught.value)
    running = replace(
        document,
        data={"status": "running", "started_at": datetime.now(UTC) - timedelta(hours=2)},
    )
    bridge._documents["d1"] = running
    lines = [line for line in bridge.metrics().splitlines() if not line.startswith("#")]
    shown = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
    assert shown["tpufleet_bridge_ended_total"] == 2
    assert shown["tpufleet_bridge_failed_total"] == 1
    assert (shown["tpufleet_bridge_errors_total"], shown["tpufleet_bridge_quota_errors_total"]) == (
        2,
        1,
    )
    assert 7200 <= shown["tpufleet_bridge_oldest_running_seconds"] < 7300
    rules = yaml.safe_load((ROOT / "deploy/k8s/base/bridge/monitoring/alerts.yaml").read_text())
    expressions = [rule["expr"] for rule in rules["spec"]["groups"][0]["rules"]]
    used = {name for text in expressions for name in re.findall(r"tpufleet_bridge_\w+", text)}
    assert used <= set(shown)


class FailingCollection:
    """A collection whose claims fail with a given error."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.rejected: list[str] = []

    def claim(self, document_id: str) -> None:
        with translate_errors():
            raise self._error

    def reject(self, document_id: str, fields: object) -> bool:
        self.rejected.append(document_id)
        return True


NOT_THE_DOCUMENTS_FAULT = {
    "missing role": exceptions.PermissionDenied("no"),
    "expired token": exceptions.Unauthenticated("no"),
    "wrong database mode": exceptions.FailedPrecondition("no"),
    "credentials cannot be refreshed": RefreshError("no"),
    "network down": exceptions.ServiceUnavailable("no"),
}


@pytest.mark.parametrize("error", NOT_THE_DOCUMENTS_FAULT.values(), ids=NOT_THE_DOCUMENTS_FAULT)
def test_no_document_fails_for_what_is_not_its_fault(error):
    collection = FailingCollection(error)
    document = replace(pending("d"), data={"status": "pending", "code": "1", "challenge_number": 1})
    with pytest.raises((PermissionMissing, Unreachable)):
        DocumentDriver(collection, None, None).claim("d", document)  # type: ignore[arg-type]
    assert collection.rejected == []


def test_a_document_that_firestore_rejects_fails():
    collection = FailingCollection(exceptions.InvalidArgument("too large"))
    document = replace(pending("d"), data={"status": "pending", "code": "1", "challenge_number": 1})
    assert DocumentDriver(collection, None, None).claim("d", document) is None  # type: ignore[arg-type]
    assert collection.rejected == ["d"]
