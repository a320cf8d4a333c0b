"""One document in our hands: submit its job, and write down how far it is, until it has ended."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from tpufleet.bridges.firestore import documents, large_results, outcomes
from tpufleet.bridges.firestore.collection import JobCollection
from tpufleet.bridges.firestore.documents import (
    LIVE_STATUSES,
    Document,
    DocumentClaim,
    DocumentStatus,
    Fields,
)
from tpufleet.bridges.firestore.jobs import FleetJobs
from tpufleet.bridges.firestore.large_results import ResultStore
from tpufleet.bridges.firestore.outcomes import CodeOutcome
from tpufleet.errors import BadInput, Conflict, Forbidden
from tpufleet.model.api_types import JobRow
from tpufleet.model.jobs import ENDED_STATES, JobState

log = logging.getLogger("tpufleet.bridge")

# The fleet will say the same again, so the client is told.
_REFUSALS = (BadInput, Conflict, Forbidden)


@dataclass(slots=True)
class HeldDocument:
    """A document that we drive, and how far we know it to be."""

    document: Document
    claim: DocumentClaim
    row: JobRow | None = None  # of its job, once submitted
    running_written: bool = False  # and written down as such
    cancel_sent: bool = False
    ended: bool = False


class DocumentDriver:
    """What each step of a document is. Holds nothing; one document is driven by one thread."""

    def __init__(self, collection: JobCollection, jobs: FleetJobs, results: ResultStore) -> None:
        self._collection = collection
        self._jobs = jobs
        self._results = results

    def claim(self, document_id: str, document: Document) -> HeldDocument | None:
        """Claim a document that waits, or whose bridge is dead. One that nobody could run ends."""
        try:
            if document.status == DocumentStatus.PENDING:
                documents.parse_request(document.data)
            claimed = self._collection.claim(document_id)
        except BadInput as error:
            self._refuse(document_id, str(error))
            return None
        if claimed is None:
            return None
        document, claim = claimed
        log.info("%s is ours as job %s (run %d)", document_id, claim.job_id, claim.run_number)
        return HeldDocument(
            document=document,
            claim=claim,
            running_written=document.status == DocumentStatus.RUNNING,
        )

    def advance(self, held: HeldDocument) -> None:
        """Bring the document to where its job is. Called again whenever either has changed."""
        if held.row is None and not self._submit(held):
            return
        assert held.row is not None
        if (
            held.document.cancel_requested
            and not held.cancel_sent
            and held.row.state not in ENDED_STATES
        ):
            self._jobs.cancel(held.claim.job_id)
            held.cancel_sent = True
        if held.row.state in (*ENDED_STATES, JobState.RECOVERING):
            outcome = self._jobs.outcome(held.row)
            if outcome is not None:
                self._end(held, outcome)
                return
        if held.row.state is JobState.RUNNING and not held.running_written:
            attempt = self._jobs.first_attempt(held.claim.job_id)
            self._write(held, documents.running_fields(attempt.running_at if attempt else None))
            held.running_written = True

    def cancel_if_abandoned(self, held: HeldDocument) -> bool:
        """The client took the document away, or ended it: nobody waits for the job any more."""
        document = self._collection.get(held.document.id)
        if document is not None and document.status in LIVE_STATUSES:
            return False
        self._jobs.cancel(held.claim.job_id)
        held.ended = True
        return True

    def _submit(self, held: HeldDocument) -> bool:
        try:
            request = documents.parse_request(held.document.data)
            held.row = self._jobs.submit(held.claim.job_id, held.document.id, request)
        except _REFUSALS as error:
            words = f"the fleet refuses the job: {error}"
            self._end(held, CodeOutcome(status=DocumentStatus.FAILED, error=words))
            return False
        return True

    def _end(self, held: HeldDocument, outcome: CodeOutcome) -> None:
        fields = self._ending(held, outcome)
        try:
            self._write(held, fields)
        except BadInput as error:  # too large in spite of all care, say
            log.warning("%s: %s", held.document.id, error)
            self._write(held, documents.ended_fields(DocumentStatus.FAILED, None, str(error)[:500]))
        held.ended = True
        log.info("%s is %s", held.document.id, fields["status"])
        if held.row is not None and held.row.state not in ENDED_STATES:
            self._jobs.cancel(held.claim.job_id)

    def _ending(self, held: HeldDocument, outcome: CodeOutcome) -> Fields:
        result, more = outcome.result, self._links(held)
        if result is not None:
            room = documents.max_result_bytes(held.document.data)
            if len(result.encode()) > room:
                more["result_url"] = self._results.put(held.claim.job_id, result)
                result = large_results.preview(result, more["result_url"])[: room or 1]
        if not held.running_written and held.row is not None:
            attempt = self._jobs.first_attempt(held.claim.job_id)
            if attempt is not None:
                more["started_at"] = attempt.running_at
        if outcome.seconds is not None:
            more["seconds"] = outcome.seconds
        error = outcome.error and outcome.error[: outcomes.MAX_ERROR_CHARS]
        return documents.ended_fields(outcome.status, result, error) | more

    def _links(self, held: HeldDocument) -> dict[str, Any]:
        return {"log_url": self._jobs.link(held.claim.job_id, "logs")} if held.row else {}

    def _write(self, held: HeldDocument, fields: Fields) -> None:
        if "log_url" not in fields and held.row is not None:
            fields = fields | self._links(held)
        self._collection.write(held.document.id, held.claim, fields)

    def _refuse(self, document_id: str, error: str) -> None:
        ending = documents.ended_fields(DocumentStatus.FAILED, None, error)
        try:
            refused = self._collection.reject(document_id, ending)
        except BadInput:  # so full that not even a reason fits
            refused = self._collection.reject(document_id, {"status": DocumentStatus.FAILED.value})
        if refused:
            log.info("%s cannot be run: %s", document_id, error)
