"""The bridge: hears of documents and jobs, and has each document driven until it has ended.

One thread decides who does what; workers do it, one at a time for each document. Whatever is not
heard of is found by looking, now and then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from tpufleet.bridges.firestore.background_tasks import BackgroundTasks, BridgeLimits
from tpufleet.bridges.firestore.cleanup import ResultCleanup
from tpufleet.bridges.firestore.collection import CollectionListener, DocumentChange, JobCollection
from tpufleet.bridges.firestore.document_state import DocumentDriver, HeldDocument
from tpufleet.bridges.firestore.documents import Document, DocumentStatus
from tpufleet.client.fleet import FleetClient
from tpufleet.clocks import jittered
from tpufleet.errors import Fenced, FleetError
from tpufleet.model.api_types import JobRow
from tpufleet.model.jobs import ENDED_STATES, JobId

log = logging.getLogger("tpufleet.bridge")

WORKERS = 8
RETRY_FIRST_SECONDS, RETRY_MAX_SECONDS = 0.5, 30.0
RELISTEN_SECONDS = 5.0
STUCK_SECONDS = 60.0  # a bridge that decides nothing for so long is to be started anew
RECHECK_SECONDS = 1.0  # until news should have come of a document that another bridge took


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
        pace: BridgeLimits,
        tidier: ResultCleanup | None = None,
    ) -> None:
        self._collection = collection
        self._driver = driver
        self._client = client
        self._pace = pace
        self._inbox: SimpleQueue[BridgeMessage] = SimpleQueue()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="bridge")
        self._stop = threading.Event()
        self._documents: dict[str, Document] = {}  # every live one, as last heard of
        self._held: dict[str, HeldDocument] = {}
        self._rows: dict[JobId, JobRow] = {}  # of their jobs, as last heard of
        self._at_work: dict[str, bool] = {}  # document → whether to look at it again afterwards
        self._retry_at: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._listener: CollectionListener | None = None
        self._listen_at = 0.0
        self._look_at = 0.0
        self._turned_at = time.monotonic()
        self._rounds = BackgroundTasks(
            collection, client, pace, tidier,
            hear=self._inbox.put,
            documents=lambda: list(self._documents.values()),
            jobs=lambda: [held.claim.job_id for held in list(self._held.values()) if held.row],
        )  # fmt: skip

    def stuck_reason(self) -> str:
        """Why it should be started anew; empty: it is well."""
        idle = time.monotonic() - self._turned_at
        return f"nothing was decided for {idle:.0f} s" if idle > STUCK_SECONDS else ""

    def unready_reason(self) -> str:
        """Why it does no work now, though it may soon; empty: it is at work."""
        if self._listener is None or not self._listener.alive:
            return "it does not listen to the collection"
        return self._rounds.heartbeat_problem()

    def stop(self) -> None:
        """From any thread or a signal handler. What is under way stays claimed for nobody."""
        self._stop.set()
        self._rounds.stop()
        self._inbox.put(None)

    def run(self) -> None:
        self._rounds.start()
        try:
            while not self._stop.is_set():
                self._turn()
        finally:
            self._workers.shutdown(wait=True, cancel_futures=True)
            self._client.close()  # ends the stream
            if self._listener is not None:
                self._listener.close()
            self._rounds.finish()

    # The thread that decides.

    def _turn(self) -> None:
        self._turned_at = time.monotonic()
        self._mind_listener()
        self._look_if_due()
        try:
            self._take(self._inbox.get(timeout=self._patience()))
            while True:
                self._take(self._inbox.get_nowait())
        except Empty:
            pass
        now = time.monotonic()
        for document_id in [each for each, at in self._retry_at.items() if at <= now]:
            del self._retry_at[document_id]
            self._see_to(document_id)
        self._fill_up()

    def _patience(self) -> float:
        moments = [self._look_at, *self._retry_at.values(), time.monotonic() + RELISTEN_SECONDS]
        return max(0.01, min(moments) - time.monotonic())

    def _take(self, news: BridgeMessage) -> None:
        match news:
            case list():
                for change in news:
                    self._hear(change)
            case JobRow():
                self._hear_of_job(news)
            case WorkResult():
                self._finish(news)

    def _hear(self, change: DocumentChange) -> None:
        known = self._documents.get(change.id)
        if change.document is None:
            self._documents.pop(change.id, None)
        elif known is None or known.updated_at <= change.document.updated_at:
            self._documents[change.id] = change.document
        self._see_to(change.id)

    def _hear_of_job(self, row: JobRow) -> None:
        known = self._rows.get(row.id)
        if known is not None and known.state in ENDED_STATES:
            return
        for document_id, held in self._held.items():
            if held.claim.job_id == row.id:
                self._rows[row.id] = row
                self._see_to(document_id)
                return

    def _fill_up(self) -> None:
        """Take on what waits, as far as there is room."""
        for document_id, document in list(self._documents.items()):
            if document.status == DocumentStatus.PENDING and document_id not in self._held:
                if not self._has_room():
                    return
                if document_id not in self._at_work and document_id not in self._retry_at:
                    self._see_to(document_id)

    def _see_to(self, document_id: str) -> None:
        """Have a worker do what is to be done about it, unless one does so already."""
        if document_id in self._at_work:
            self._at_work[document_id] = True
            return
        held, document = self._held.get(document_id), self._documents.get(document_id)
        work: Callable[[], HeldDocument | None]
        if held is not None:
            row = self._rows.get(held.claim.job_id)
            work = lambda: self._drive(held, document, row)
        elif document is not None and self._is_free(document):
            work = lambda: self._driver.claim(document_id, document)
        else:
            return
        self._at_work[document_id] = False
        self._workers.submit(self._work, document_id, work)

    def _has_room(self) -> bool:
        return len(self._held.keys() | self._at_work.keys()) < self._pace.most

    def _is_free(self, document: Document) -> bool:
        if not self._has_room():
            return False
        if document.status == DocumentStatus.PENDING:
            return True
        claim = document.claim
        others = self._rounds.live_bridges - {self._collection.holder}
        return claim is not None and claim.holder not in others

    def _finish(self, worked: WorkResult) -> None:
        document_id, held = worked.document_id, worked.held
        again = self._at_work.pop(document_id)
        if worked.error is not None:
            self._put_off(document_id, worked.error)
            return
        self._failures.pop(document_id, None)
        fresh = document_id not in self._held
        if held is None:  # another bridge was first, or it could not be run: news will say so
            self._retry_at[document_id] = time.monotonic() + RECHECK_SECONDS
            return
        if held.ended:
            self._held.pop(document_id, None)
            self._rows.pop(held.claim.job_id, None)
            return
        self._held[document_id] = held
        if fresh or again:
            self._see_to(document_id)

    def _put_off(self, document_id: str, error: Exception) -> None:
        if isinstance(error, Fenced):
            log.info("let go: %s", error)
            held = self._held.pop(document_id, None)
            if held is not None:
                self._rows.pop(held.claim.job_id, None)
            return
        if not isinstance(error, FleetError):
            log.error("%s stumbled", document_id, exc_info=error)
        failures = self._failures[document_id] = self._failures.get(document_id, 0) + 1
        pause = min(RETRY_MAX_SECONDS, RETRY_FIRST_SECONDS * 2 ** min(failures - 1, 10))
        self._retry_at[document_id] = time.monotonic() + jittered(pause)
        if failures == 1:
            log.warning("%s is put off: %s", document_id, error)

    def _mind_listener(self) -> None:
        """A listener that died is replaced. It tells every live document anew."""
        if self._listener is not None and self._listener.alive:
            return
        if time.monotonic() < self._listen_at:
            return
        if self._listener is not None:
            log.warning("the listener died; listening anew")
        self._listen_at = time.monotonic() + RELISTEN_SECONDS
        self._listener = self._collection.listen(self._inbox.put)

    def _look_if_due(self) -> None:
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + jittered(self._pace.look, minimum=0.8)
        self._workers.submit(self._rounds.resync)

    # Workers.

    def _work(self, document_id: str, work: Callable[[], HeldDocument | None]) -> None:
        try:
            self._inbox.put(WorkResult(document_id, work()))
        except Exception as error:
            self._inbox.put(WorkResult(document_id, None, error))

    def _drive(
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
