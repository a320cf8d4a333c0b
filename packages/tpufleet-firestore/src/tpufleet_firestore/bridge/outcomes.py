"""The outcome of a document's code, from the job's result file or from the state it ended in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tpufleet.errors import BadInput
from tpufleet.model.api_types import JobRow
from tpufleet.model.job.jobs import JobState
from tpufleet.model.values.encoding import from_json
from tpufleet_firestore.bridge.documents import DocumentStatus

MAX_ERROR_CHARS = 96 * 1024  # characters
NO_ERROR = "the job ended with neither a result nor an error"


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeOutcome:
    """Also the file that the supervisor of the code writes."""

    status: DocumentStatus
    result: str | None = None
    error: str | None = None
    seconds: float | None = None  # run time of the code


def parse_result(data: bytes) -> CodeOutcome:
    """Takes only the document's own outcome from the file, because the code may have forged it."""
    try:
        outcome = from_json(data, CodeOutcome, "result file")
    except BadInput as error:
        return _failed(str(error))
    if outcome.status == DocumentStatus.COMPLETED:
        return replace(outcome, error=None)
    message = outcome.error or NO_ERROR
    return replace(
        outcome, status=DocumentStatus.FAILED, result=None, error=message[:MAX_ERROR_CHARS]
    )


def outcome_of_job(row: JobRow) -> CodeOutcome:
    """The outcome of a job that has ended without a result file."""
    match row.state:
        case JobState.CANCELLED:
            return _failed(f"cancelled: {row.reason}")
        case JobState.SUCCEEDED:
            return _failed(NO_ERROR)
        case _:
            return _failed(f"the job failed: {row.reason}")


def _failed(error: str) -> CodeOutcome:
    return CodeOutcome(status=DocumentStatus.FAILED, error=error[:MAX_ERROR_CHARS])
