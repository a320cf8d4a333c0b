"""What became of a document's code, read from what its job handed over or from how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from tpufleet.bridges.firestore.documents import DocumentStatus
from tpufleet.errors import BadInput
from tpufleet.model.api_types import JobRow
from tpufleet.model.encoding import from_json
from tpufleet.model.jobs import JobState

MAX_ERROR_CHARS = 96 * 1024  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultFile:
    """The file that the supervisor of the code leaves."""

    status: str
    result: str | None = None
    error: str | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeOutcome:
    status: DocumentStatus
    result: str | None = None
    error: str | None = None
    seconds: float | None = None  # that the code ran


def parse_result(handed: bytes) -> CodeOutcome:
    """Code can write this file where it runs as the one who supervises it, so nothing in it is
    believed beyond the document's own outcome."""
    try:
        told = from_json(handed, ResultFile)
    except BadInput as error:
        return _failed(f"the job handed over something that is no outcome: {error}")
    if told.status == DocumentStatus.COMPLETED:
        return CodeOutcome(
            status=DocumentStatus.COMPLETED, result=told.result, seconds=told.seconds
        )
    words = told.error or "the code failed, and did not say how"
    return CodeOutcome(
        status=DocumentStatus.FAILED, error=words[:MAX_ERROR_CHARS], seconds=told.seconds
    )


def outcome_of_job(row: JobRow) -> CodeOutcome:
    """The outcome of a job that has ended and handed nothing over."""
    match row.state:
        case JobState.CANCELLED:
            return _failed(f"cancelled: {row.reason}")
        case JobState.SUCCEEDED:
            return _failed("the job ended without handing over a result")
        case _:
            return _failed(f"the job failed: {row.reason}")


def _failed(error: str) -> CodeOutcome:
    return CodeOutcome(status=DocumentStatus.FAILED, error=error[:MAX_ERROR_CHARS])
