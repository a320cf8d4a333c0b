"""A bridge's background work: heartbeats, the stream of job changes, periodic resync, cleanup."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tpufleet.backoff import Backoff
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import FleetError
from tpufleet.model.api_types import JobRow
from tpufleet.model.job.jobs import JobId
from tpufleet_firestore.bridge.cleanup import ResultCleanup
from tpufleet_firestore.bridge.collection import DocumentChange, JobCollection
from tpufleet_firestore.bridge.documents import LIVE_STATUSES, Document, DocumentStatus

log = logging.getLogger("tpufleet.bridge")

MISSED_HEARTBEATS = 3  # after which a bridge counts as dead
RECONNECT_FIRST_SECONDS, RECONNECT_MAX_SECONDS = 0.5, 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgeLimits:
    max_documents: int = 100  # claimed at a time; more are left to other bridges
    heartbeat_seconds: float = 5.0
    resync_seconds: float = 30.0


@contextmanager
def _surviving(task: str) -> Iterator[None]:
    """Log why a task failed. It is tried again."""
    try:
        yield
    except Exception as error:
        log_failure(task, error)


def log_failure(task: str, error: Exception) -> None:
    unexpected = error if not isinstance(error, FleetError) else None
    log.warning("%s failed: %s; retrying", task, error, exc_info=unexpected)


class BackgroundTasks:
    """Heartbeats and the job stream run in two threads; `resync` is called by workers.

    `notify` receives every change. `known_documents` and `held_jobs` return what the bridge knows
    of and waits for.
    """

    def __init__(
        self,
        collection: JobCollection,
        client: FleetClient,
        limits: BridgeLimits,
        cleanup: ResultCleanup | None,
        *,
        notify: Callable[[list[DocumentChange] | JobRow], None],
        known_documents: Callable[[], Sequence[Document]],
        held_jobs: Callable[[], Sequence[JobId]],
    ) -> None:
        self._collection, self._client = collection, client
        self._limits, self._cleanup = limits, cleanup
        self._notify, self._known_documents, self._held_jobs = notify, known_documents, held_jobs
        self._stop = threading.Event()
        self._last_heartbeat = float("-inf")
        self._cleanup_at = 0.0
        self.live_bridges: frozenset[str] = frozenset()
        self._heartbeats = threading.Thread(
            target=self._send_heartbeats, name="heartbeats", daemon=True
        )
        self._stream = threading.Thread(target=self._follow_jobs, name="jobs", daemon=True)

    def start(self) -> None:
        self._heartbeats.start()
        self._stream.start()

    def stop(self) -> None:
        self._stop.set()

    def finish(self) -> None:
        """After `stop`. Without a heartbeat, other bridges take over the documents at once."""
        self._heartbeats.join(self._limits.heartbeat_seconds)
        with _surviving("the end of the heartbeat"):
            self._collection.delete_heartbeat()

    @property
    def has_started(self) -> bool:
        """Before any claim, so that other bridges see this one as alive."""
        return self._last_heartbeat > float("-inf")

    def heartbeat_problem(self) -> str:
        """Why other bridges may consider this one dead; empty when they do not."""
        age = time.monotonic() - self._last_heartbeat
        overdue = age > self._limits.heartbeat_seconds * MISSED_HEARTBEATS
        return f"no heartbeat written for {age:.0f} s" if overdue else ""

    def resync(self) -> None:
        """Read every live document and every held job, in case a change was missed."""
        with _surviving("the resync"):
            live = {document.id: document for document in self._collection.live_documents()}
            unlisted = [
                document.id for document in self._known_documents() if document.id not in live
            ]
            gone = [document_id for document_id in unlisted if not self._is_live(document_id)]
            self._notify(
                [DocumentChange(id=id, document=document) for id, document in live.items()]
            )
            self._notify([DocumentChange(id=document_id, document=None) for document_id in gone])
            for job_id in self._held_jobs():
                self._notify(self._client.job(job_id).row)
        self._clean_up_if_due()

    def _is_live(self, document_id: str) -> bool:
        document = self._collection.get(document_id)
        return document is not None and document.status in LIVE_STATUSES

    def _clean_up_if_due(self) -> None:
        if self._cleanup is None or time.monotonic() < self._cleanup_at:
            return
        self._cleanup_at = time.monotonic() + self._cleanup.interval.total_seconds()
        with _surviving("the cleanup"):
            while self._cleanup.run_once() and not self._stop.is_set():
                continue

    def _send_heartbeats(self) -> None:
        while not self._stop.is_set():
            with _surviving("the heartbeat"):
                self._collection.write_heartbeat()
                self.live_bridges = self._collection.live_bridges()
                self._last_heartbeat = time.monotonic()
                self._notify(self._orphans(self.live_bridges))
            self._stop.wait(self._limits.heartbeat_seconds)

    def _orphans(self, live_bridges: frozenset[str]) -> list[DocumentChange]:
        """Documents whose bridge is dead."""
        return [
            DocumentChange(id=document.id, document=document)
            for document in self._known_documents()
            if document.claim is not None
            and document.status != DocumentStatus.PENDING
            and document.claim.holder not in live_bridges
        ]

    def _follow_jobs(self) -> None:
        backoff = Backoff(first=RECONNECT_FIRST_SECONDS, longest=RECONNECT_MAX_SECONDS)
        while not self._stop.is_set():
            with _surviving("the stream of job changes"):
                for update in self._client.stream():
                    backoff.succeeded()
                    if isinstance(update, JobRow):
                        self._notify(update)
            self._stop.wait(backoff.failed())
