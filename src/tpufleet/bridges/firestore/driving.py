"""One document in our hands: submit its job, and write down how far it is, until it has ended."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from tpufleet.bridges.firestore import documents, large_results, outcomes
from tpufleet.bridges.firestore.collection import Collection
from tpufleet.bridges.firestore.documents import LIVE, Claim, Document, Fields, Status
from tpufleet.bridges.firestore.jobs import Jobs
from tpufleet.bridges.firestore.large_results import Results
from tpufleet.bridges.firestore.outcomes import Outcome
from tpufleet.errors import BadInput, Conflict, Forbidden
from tpufleet.model.jobs import ENDED, JobState
from tpufleet.model.views import JobRow

log = logging.getLogger("tpufleet.bridge")

# The fleet will say the same again, so the client is told.
_REFUSALS = (BadInput, Conflict, Forbidden)


@dataclass(slots=True)
class Held:
    """A document that we drive, and how far we know it to be."""

    document: Document
    claim: Claim
    row: JobRow | None = None  # of its job, once submitted
    running: bool = False  # and written down as such
    cancelled: bool = False
    over: bool = False


class Driver:
    """What each step of a document is. Holds nothing; one document is driven by one thread."""

    def __init__(self, collection: Collection, jobs: Jobs, results: Results) -> None:
        self._collection = collection
        self._jobs = jobs
        self._results = results

    def take(self, document_id: str, document: Document) -> Held | None:
        """Claim a document that waits, or whose bridge is dead. One that nobody could run ends."""
        try:
            if document.status == Status.PENDING:
                documents.request_of(document.data)
            claimed = self._collection.claim(document_id)
        except BadInput as error:
            self._refuse(document_id, str(error))
            return None
        if claimed is None:
            return None
        document, claim = claimed
        log.info("%s is ours as job %s (run %d)", document_id, claim.job, claim.run)
        return Held(document=document, claim=claim, running=document.status == Status.RUNNING)

    def step(self, held: Held) -> None:
        """Bring the document to where its job is. Called again whenever either has changed."""
        if held.row is None and not self._submit(held):
            return
        assert held.row is not None
        if held.document.wants_cancel and not held.cancelled and held.row.state not in ENDED:
            self._jobs.cancel(held.claim.job)
            held.cancelled = True
        if held.row.state in (*ENDED, JobState.RECOVERING):
            outcome = self._jobs.outcome(held.row)
            if outcome is not None:
                self._end(held, outcome)
                return
        if held.row.state is JobState.RUNNING and not held.running:
            attempt = self._jobs.first_attempt(held.claim.job)
            self._write(held, documents.on_running(attempt.running_at if attempt else None))
            held.running = True

    def abandon_if_lost(self, held: Held) -> bool:
        """The client took the document away, or ended it: nobody waits for the job any more."""
        document = self._collection.get(held.document.id)
        if document is not None and document.status in LIVE:
            return False
        self._jobs.cancel(held.claim.job)
        held.over = True
        return True

    def _submit(self, held: Held) -> bool:
        try:
            request = documents.request_of(held.document.data)
            held.row = self._jobs.submit(held.claim.job, held.document.id, request)
        except _REFUSALS as error:
            words = f"the fleet refuses the job: {error}"
            self._end(held, Outcome(status=Status.FAILED, error=words))
            return False
        return True

    def _end(self, held: Held, outcome: Outcome) -> None:
        fields = self._ending(held, outcome)
        try:
            self._write(held, fields)
        except BadInput as error:  # too large in spite of all care, say
            log.warning("%s: %s", held.document.id, error)
            self._write(held, documents.on_end(Status.FAILED, None, str(error)[:500]))
        held.over = True
        log.info("%s is %s", held.document.id, fields["status"])
        if held.row is not None and held.row.state not in ENDED:
            self._jobs.cancel(held.claim.job)

    def _ending(self, held: Held, outcome: Outcome) -> Fields:
        result, more = outcome.result, self._links(held)
        if result is not None:
            room = documents.room_for_result(held.document.data)
            if len(result.encode()) > room:
                more["result_url"] = self._results.keep(held.claim.job, result)
                result = large_results.shown(result, more["result_url"])[: room or 1]
        if not held.running and held.row is not None:
            attempt = self._jobs.first_attempt(held.claim.job)
            if attempt is not None:
                more["started_at"] = attempt.running_at
        if outcome.seconds is not None:
            more["seconds"] = outcome.seconds
        error = outcome.error and outcome.error[: outcomes.LONGEST_ERROR]
        return documents.on_end(outcome.status, result, error) | more

    def _links(self, held: Held) -> dict[str, Any]:
        return {"log_url": self._jobs.link(held.claim.job, "logs")} if held.row else {}

    def _write(self, held: Held, fields: Fields) -> None:
        if "log_url" not in fields and held.row is not None:
            fields = fields | self._links(held)
        self._collection.write(held.document.id, held.claim, fields)

    def _refuse(self, document_id: str, error: str) -> None:
        ending = documents.on_end(Status.FAILED, None, error)
        try:
            refused = self._collection.refuse(document_id, ending)
        except BadInput:  # so full that not even a reason fits
            refused = self._collection.refuse(document_id, {"status": Status.FAILED.value})
        if refused:
            log.info("%s cannot be run: %s", document_id, error)
