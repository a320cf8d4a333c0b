"""Advances a claimed document: submit its job, then write the job's state until it has ended."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from tpufleet.errors import BadInput, Conflict, Forbidden
from tpufleet.model.api_types import JobRow
from tpufleet.model.job.jobs import ENDED_STATES, JobState
from tpufleet_firestore.bridge import documents, large_results, outcomes
from tpufleet_firestore.bridge.collection import JobCollection
from tpufleet_firestore.bridge.documents import (
    LIVE_STATUSES,
    Document,
    DocumentClaim,
    DocumentStatus,
    Fields,
)
from tpufleet_firestore.bridge.jobs import FleetJobs
from tpufleet_firestore.bridge.large_results import ResultStore
from tpufleet_firestore.bridge.outcomes import CodeOutcome

log = logging.getLogger("tpufleet.bridge")

# Errors that a retry would repeat, so the document fails.
_REJECTIONS = (BadInput, Conflict, Forbidden)


@dataclass(slots=True)
class HeldDocument:
    """A document claimed by this bridge, and its progress as far as known."""

    document: Document
    claim: DocumentClaim
    row: JobRow | None = None  # of its job, once submitted
    running_written: bool = False  # the document says `running`
    cancel_sent: bool = False
    ended: bool = False


class DocumentDriver:
    """Stateless. At most one thread at a time may advance a document."""

    def __init__(self, collection: JobCollection, jobs: FleetJobs, results: ResultStore) -> None:
        self._collection = collection
        self._jobs = jobs
        self._results = results

    def claim(self, document_id: str, document: Document) -> HeldDocument | None:
        """Claim a document that is pending or abandoned, or whose bridge is dead. An invalid one
        fails."""
        try:
            if document.status == DocumentStatus.PENDING:
                documents.parse_request(document.data)
                documents.check_free_space(document)
            claimed = self._collection.claim(document_id)
        except BadInput as error:
            self._reject(document_id, str(error))
            return None
        if claimed is None:
            return None
        document, claim = claimed
        log.info("claimed %s as job %s (run %d)", document_id, claim.job_id, claim.run_number)
        return HeldDocument(
            document=document,
            claim=claim,
            running_written=document.status == DocumentStatus.RUNNING,
        )

    def advance(self, held: HeldDocument) -> None:
        """Bring the document to its job's state. Called whenever either has changed."""
        if held.row is None and not self._submit(held):
            return
        assert held.row is not None
        ended = held.row.state in ENDED_STATES
        if held.document.cancel_requested and not held.cancel_sent and not ended:
            self._jobs.cancel(held.claim.job_id)
            held.cancel_sent = True
        if ended or held.row.state is JobState.RECOVERING:
            outcome = self._jobs.outcome(held.row)
            if outcome is not None:
                self._end(held, outcome)
                return
        if held.row.state is JobState.RUNNING and not held.running_written:
            attempt = self._jobs.first_attempt(held.claim.job_id)
            self._write(held, documents.running_fields(attempt.running_at if attempt else None))
            held.running_written = True

    def cancel_if_abandoned(self, held: HeldDocument) -> bool:
        """Cancel the job if the client has deleted or ended the document."""
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
        except _REJECTIONS as error:
            message = f"the server rejected the job: {error}"
            self._end(held, CodeOutcome(status=DocumentStatus.FAILED, error=message))
            return False
        return True

    def _end(self, held: HeldDocument, outcome: CodeOutcome) -> None:
        fields = self._ended_fields(held, outcome)
        try:
            self._collection.write(held.document.id, held.claim, fields)
        except BadInput as error:  # Firestore rejects it: the client has added to the document
            log.warning("%s: %s", held.document.id, error)
            self._write(held, documents.ended_fields(DocumentStatus.FAILED, None, str(error)[:500]))
        held.ended = True
        log.info("%s: %s", held.document.id, fields["status"])
        if held.row is not None and held.row.state not in ENDED_STATES:
            self._jobs.cancel(held.claim.job_id)

    def _ended_fields(self, held: HeldDocument, outcome: CodeOutcome) -> Fields:
        result, extra = outcome.result, self._links(held)
        limit = documents.max_text_bytes(held.document)
        if result is not None and len(result.encode()) > limit:
            extra["result_url"] = self._results.put(held.claim.job_id, result)
            result = large_results.preview(result, extra["result_url"], limit)
        if not held.running_written and held.row is not None:
            attempt = self._jobs.first_attempt(held.claim.job_id)
            if attempt is not None:
                extra["started_at"] = attempt.running_at
        if outcome.seconds is not None:
            extra["seconds"] = outcome.seconds
        error = outcome.error and large_results.truncate(
            outcome.error[: outcomes.MAX_ERROR_CHARS], limit
        )
        return documents.ended_fields(outcome.status, result, error) | extra

    def _links(self, held: HeldDocument) -> dict[str, Any]:
        return {"log_url": self._jobs.link(held.claim.job_id, "logs")} if held.row else {}

    def _write(self, held: HeldDocument, fields: Fields) -> None:
        """With a link to the log. A document without space for it gets the status alone, which
        always fits, because each status is shorter than the one before."""
        try:
            self._collection.write(held.document.id, held.claim, fields | self._links(held))
        except BadInput as error:
            log.warning("%s: %s", held.document.id, error)
            status = {"status": fields["status"]}
            self._collection.write(held.document.id, held.claim, status)

    def _reject(self, document_id: str, error: str) -> None:
        fields = documents.ended_fields(DocumentStatus.FAILED, None, error)
        try:
            rejected = self._collection.reject(document_id, fields)
        except BadInput:  # the document is too full even for the error
            rejected = self._collection.reject(document_id, {"status": DocumentStatus.FAILED.value})
        if rejected:
            log.info("%s: %s", document_id, error)
