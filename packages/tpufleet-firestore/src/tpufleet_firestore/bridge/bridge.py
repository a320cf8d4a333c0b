"""The bridge: follows documents and jobs, and advances each document until it has ended.

One thread makes the decisions; workers carry them out, at most one per document. A periodic resync
finds changes that the listeners missed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from tpufleet.backoff import Backoff
from tpufleet.client.fleet import FleetClient
from tpufleet.clocks import jittered
from tpufleet.errors import Fenced
from tpufleet.model.api_types import JobRow
from tpufleet.model.job.jobs import ENDED_STATES, JobId, JobState
from tpufleet_firestore.bridge import documents
from tpufleet_firestore.bridge.background_tasks import BackgroundTasks, BridgeLimits, log_failure
from tpufleet_firestore.bridge.cleanup import ResultCleanup
from tpufleet_firestore.bridge.collection import (
    DocumentChange,
    FirestoreQuotaExceeded,
    JobCollection,
)
from tpufleet_firestore.bridge.document_driver import DocumentDriver, HeldDocument
from tpufleet_firestore.bridge.documents import Document, DocumentStatus
from tpufleet_firestore.bridge.metrics import exposition

if TYPE_CHECKING:
    from google.cloud.firestore_v1.watch import Watch

log = logging.getLogger("tpufleet.bridge")

WORKERS = 8
RETRY_FIRST_SECONDS, RETRY_MAX_SECONDS = 0.5, 30.0
RELISTEN_SECONDS = 5.0
STUCK_SECONDS = 60.0  # without an iteration of the main loop
RECHECK_SECONDS = 1.0  # the listener should report a document claimed by another bridge by then


@dataclass(frozen=True, slots=True)
class WorkResult:
    document_id: str
    held: HeldDocument | None
    error: Exception | None = None


BridgeMessage = list[DocumentChange] | JobRow | WorkResult | None


class Bridge:
    def __init__(
        self,
        collection: JobCollection,
        driver: DocumentDriver,
        client: FleetClient,
        limits: BridgeLimits,
        cleanup: ResultCleanup | None = None,
    ) -> None:
        self._collection = collection
        self._driver = driver
        self._client = client
        self._limits = limits
        self._inbox: SimpleQueue[BridgeMessage] = SimpleQueue()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="bridge")
        self._stop = threading.Event()
        self._documents: dict[str, Document] = {}  # every live document, as last reported
        self._held: dict[str, HeldDocument] = {}
        self._rows: dict[JobId, JobRow] = {}  # of held jobs, as last reported
        self._in_progress: dict[str, bool] = {}  # by document: whether to schedule it again
        self._retry_at: dict[str, float] = {}
        self._backoffs: dict[str, Backoff] = {}
        self._listener: Watch | None = None
        self._listen_at = 0.0
        self._resync_at = 0.0
        self._last_iteration = time.monotonic()
        # Since the start.
        self._claims = self._ended = self._failed = self._errors = self._quota_errors = 0
        self._background = BackgroundTasks(
            collection,
            client,
            limits,
            cleanup,
            notify=self._inbox.put,
            known_documents=lambda: list(self._documents.values()),
            held_jobs=lambda: [held.claim.job_id for held in list(self._held.values()) if held.row],
        )

    def stuck_reason(self) -> str:
        """Why the bridge should be restarted; empty when it should not."""
        age = time.monotonic() - self._last_iteration
        return f"the main loop has not run for {age:.0f} s" if age > STUCK_SECONDS else ""

    def unready_reason(self) -> str:
        """Why the bridge does no work at the moment; empty when it does."""
        if self._listener is None or not self._listener.is_active:
            return "not listening to the collection"
        return self._background.heartbeat_problem()

    def metrics(self) -> str:
        """From any thread."""
        values = {
            "claimed_documents": len(self._held),
            "retrying_documents": len(self._backoffs),
            "loop_age_seconds": time.monotonic() - self._last_iteration,
            "ready": not self.unready_reason(),
            "claims_total": self._claims,
            "oldest_running_seconds": self._oldest_running(),
            "ended_total": self._ended,
            "failed_total": self._failed,
            "errors_total": self._errors,
            "quota_errors_total": self._quota_errors,
        }
        statuses = Counter(str(document.status) for document in list(self._documents.values()))
        return exposition(statuses, values)

    def _oldest_running(self) -> float:
        now = datetime.now(UTC)
        live = list(self._documents.values())
        started = [
            at
            for document in live
            if document.status == DocumentStatus.RUNNING
            and isinstance(at := document.data.get("started_at"), datetime)
        ]
        return max(((now - at).total_seconds() for at in started), default=0.0)

    def stop(self) -> None:
        """From any thread or a signal handler. Claims are left for other bridges to take over."""
        self._stop.set()
        self._background.stop()
        self._inbox.put(None)

    def run(self) -> None:
        self._background.start()
        try:
            while not self._stop.is_set():
                self._iterate()
        finally:
            self._workers.shutdown(wait=True, cancel_futures=True)
            self._client.close()  # ends the stream of job changes
            if self._listener is not None:
                self._listener.unsubscribe()
            self._background.finish()

    # The deciding thread

    def _iterate(self) -> None:
        self._last_iteration = time.monotonic()
        if self._background.has_started:
            self._ensure_listening()
            self._resync_if_due()
        try:
            self._handle(self._inbox.get(timeout=self._wait_seconds()))
            while True:
                self._handle(self._inbox.get_nowait())
        except Empty:
            pass
        now = time.monotonic()
        for document_id in [id for id, retry_at in self._retry_at.items() if retry_at <= now]:
            del self._retry_at[document_id]
            self._schedule(document_id)
        self._claim_pending()

    def _wait_seconds(self) -> float:
        now = time.monotonic()
        due = min(now + RELISTEN_SECONDS, *self._retry_at.values(), float("inf"))
        if self._background.has_started:
            due = min(due, self._resync_at)
        return max(0.01, due - now)

    def _handle(self, message: BridgeMessage) -> None:
        match message:
            case list():
                for change in message:
                    self._handle_change(change)
            case JobRow():
                self._handle_job(message)
            case WorkResult():
                self._handle_result(message)

    def _handle_change(self, change: DocumentChange) -> None:
        known = self._documents.get(change.id)
        if change.document is None:
            self._documents.pop(change.id, None)
        elif known is None or known.updated_at <= change.document.updated_at:
            self._documents[change.id] = change.document
        self._schedule(change.id)

    def _handle_job(self, row: JobRow) -> None:
        known = self._rows.get(row.id)
        if known is not None and known.state in ENDED_STATES:
            return
        for document_id, held in self._held.items():
            if held.claim.job_id == row.id:
                self._rows[row.id] = row
                self._schedule(document_id)
                return

    def _claim_pending(self) -> None:
        """Claim pending documents up to the limit."""
        for document_id, document in list(self._documents.items()):
            if document.status == DocumentStatus.PENDING and document_id not in self._held:
                if not self._below_limit():
                    return
                if document_id not in self._in_progress and document_id not in self._retry_at:
                    self._schedule(document_id)

    def _schedule(self, document_id: str) -> None:
        """Give the document to a worker, or mark it for later when one is working on it."""
        if document_id in self._in_progress:
            self._in_progress[document_id] = True
            return
        held, document = self._held.get(document_id), self._documents.get(document_id)
        work: Callable[[], HeldDocument | None]
        if held is not None:
            row = self._rows.get(held.claim.job_id)
            work = lambda: self._advance(held, document, row)
        elif document is not None and self._is_claimable(document):
            work = lambda: self._driver.claim(document_id, document)
        else:
            return
        self._in_progress[document_id] = False
        self._workers.submit(self._work, document_id, work)

    def _below_limit(self) -> bool:
        return len(self._held.keys() | self._in_progress.keys()) < self._limits.max_documents

    def _is_claimable(self, document: Document) -> bool:
        if not self._below_limit():
            return False
        if document.status == DocumentStatus.PENDING:
            return True
        claim = document.claim
        if claim is None:
            return documents.is_abandoned(document, self._collection.adopt_after)
        return claim.holder not in self._background.live_bridges - {self._collection.holder}

    def _handle_result(self, result: WorkResult) -> None:
        document_id, held = result.document_id, result.held
        again = self._in_progress.pop(document_id)
        if result.error is not None:
            self._handle_error(document_id, result.error)
            return
        self._backoffs.pop(document_id, None)
        newly_claimed = document_id not in self._held
        if held is None:  # claimed by another bridge, or rejected: a change will be reported
            self._retry_at[document_id] = time.monotonic() + RECHECK_SECONDS
            return
        self._claims += newly_claimed
        if held.ended:
            self._ended += 1
            self._failed += held.row is not None and held.row.state is JobState.FAILED
            self._held.pop(document_id, None)
            self._rows.pop(held.claim.job_id, None)
            return
        self._held[document_id] = held
        if newly_claimed or again:
            self._schedule(document_id)

    def _handle_error(self, document_id: str, error: Exception) -> None:
        if isinstance(error, Fenced):
            log.info("released %s: %s", document_id, error)
            held = self._held.pop(document_id, None)
            if held is not None:
                self._rows.pop(held.claim.job_id, None)
            return
        self._errors += 1
        self._quota_errors += isinstance(error, FirestoreQuotaExceeded)
        backoff = self._backoffs.setdefault(
            document_id, Backoff(first=RETRY_FIRST_SECONDS, longest=RETRY_MAX_SECONDS)
        )
        self._retry_at[document_id] = time.monotonic() + backoff.failed()
        if backoff.failures == 1:
            log_failure(document_id, error)

    def _ensure_listening(self) -> None:
        """Replace a dead listener. A new one reports every live document again."""
        if self._listener is not None and self._listener.is_active:
            return
        if time.monotonic() < self._listen_at:
            return
        if self._listener is not None:
            log.warning("the Firestore listener died; starting a new one")
        self._listen_at = time.monotonic() + RELISTEN_SECONDS
        self._listener = self._collection.listen(self._inbox.put)

    def _resync_if_due(self) -> None:
        if time.monotonic() < self._resync_at:
            return
        self._resync_at = time.monotonic() + jittered(self._limits.resync_seconds, minimum=0.8)
        self._workers.submit(self._background.resync)

    # Worker threads

    def _work(self, document_id: str, work: Callable[[], HeldDocument | None]) -> None:
        try:
            self._inbox.put(WorkResult(document_id, work()))
        except Exception as error:
            self._inbox.put(WorkResult(document_id, None, error))

    def _advance(
        self, held: HeldDocument, document: Document | None, row: JobRow | None
    ) -> HeldDocument:
        held.row = row or held.row
        if document is not None:
            held.document = document
        elif self._driver.cancel_if_abandoned(held):
            return held
        try:
            self._driver.advance(held)
        except Fenced:
            if not self._driver.cancel_if_abandoned(held):
                raise
        return held
