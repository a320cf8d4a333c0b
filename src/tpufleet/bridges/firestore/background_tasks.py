"""What a bridge does beside driving documents: it gives signs of life, hears of jobs, looks around
for what it did not hear of, and clears up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tpufleet.bridges.firestore.cleanup import ResultCleanup
from tpufleet.bridges.firestore.collection import DocumentChange, JobCollection
from tpufleet.bridges.firestore.documents import LIVE_STATUSES, Document, DocumentStatus
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import FleetError
from tpufleet.model.api_types import JobRow
from tpufleet.model.jobs import JobId

log = logging.getLogger("tpufleet.bridge")

MISSED_HEARTBEATS = 3  # until a bridge counts as dead
HEAR_AGAIN_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgeLimits:
    most: int = 100  # documents in our hands at a time; the others are for other bridges
    beat: float = 5.0  # seconds between signs of life
    look: float = 30.0  # seconds between looks at everything


class BackgroundTasks:
    """`hear` is told all that is new; `documents` and `jobs` are those that the bridge knows of and
    waits for. Two threads from `start` to `stop`; the rest is called by workers."""

    def __init__(
        self,
        collection: JobCollection,
        client: FleetClient,
        pace: BridgeLimits,
        tidier: ResultCleanup | None,
        *,
        hear: Callable[[list[DocumentChange] | JobRow], None],
        documents: Callable[[], Sequence[Document]],
        jobs: Callable[[], Sequence[JobId]],
    ) -> None:
        self._collection, self._client, self._pace, self._tidier = collection, client, pace, tidier
        self._hear, self._documents, self._jobs = hear, documents, jobs
        self._stop = threading.Event()
        self._beaten_at: float | None = None
        self._tidy_at = 0.0
        self.live_bridges: frozenset[str] = frozenset()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("heart", self._keep_beating), ("fleet", self._follow_fleet))
        ]

    def start(self) -> None:
        self._beat()  # before any claim: others must see that we live
        self.live_bridges = self._collection.live_bridges()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()

    def finish(self) -> None:
        """After `stop`: whoever looks takes over at once what we held."""
        self._threads[0].join(self._pace.beat)
        self._collection.delete_heartbeat()

    def heartbeat_problem(self) -> str:
        """Why others may think that we are dead; empty: we are well."""
        if self._beaten_at is None:
            return "it has given no sign of life yet"
        silence = time.monotonic() - self._beaten_at
        missed = silence > self._pace.beat * MISSED_HEARTBEATS
        return f"it could give no sign of life for {silence:.0f} s" if missed else ""

    def resync(self) -> None:
        """At every live document and at the job of each that we hold, lest something was missed."""
        try:
            found = {each.id: each for each in self._collection.live_documents()}
            doubtful = [each.id for each in self._documents() if each.id not in found]
            there = {each: self._collection.get(each) for each in doubtful}
            gone = [
                each
                for each, now in there.items()
                if now is None or now.status not in LIVE_STATUSES
            ]
            self._hear([DocumentChange(id=each.id, document=each) for each in found.values()])
            self._hear([DocumentChange(id=each, document=None) for each in gone])
            for job_id in self._jobs():
                self._hear(self._client.job(job_id).row)
        except FleetError as error:
            log.warning("a look around failed: %s", error)
        except Exception:
            log.exception("a look around stumbled")
        self._tidy_if_due()

    def _tidy_if_due(self) -> None:
        if self._tidier is None or time.monotonic() < self._tidy_at:
            return
        self._tidy_at = time.monotonic() + self._tidier.interval.total_seconds()
        try:
            while self._tidier.run_once() and not self._stop.is_set():
                continue
        except FleetError as error:
            log.warning("not all could be cleared up: %s", error)
        except Exception:
            log.exception("clearing up stumbled")

    def _keep_beating(self) -> None:
        while not self._stop.wait(self._pace.beat):
            try:
                self._beat()
                living = self._collection.live_bridges()
            except FleetError as error:
                log.warning("no sign of life could be given: %s", error)
                continue
            except Exception:
                log.exception("the heart stumbled")
                continue
            self.live_bridges = living
            self._hear(self._orphans(living))

    def _beat(self) -> None:
        self._collection.write_heartbeat()
        self._beaten_at = time.monotonic()

    def _orphans(self, living: frozenset[str]) -> list[DocumentChange]:
        return [
            DocumentChange(id=each.id, document=each)
            for each in self._documents()
            if each.claim is not None
            and each.status != DocumentStatus.PENDING
            and each.claim.holder not in living
        ]

    def _follow_fleet(self) -> None:
        while not self._stop.is_set():
            try:
                for told in self._client.stream():
                    if isinstance(told, JobRow):
                        self._hear(told)
            except FleetError as error:
                log.warning("no news from the fleet: %s", error)
            except Exception:
                log.exception("listening to the fleet stumbled; listening anew")
            self._stop.wait(HEAR_AGAIN_SECONDS)
