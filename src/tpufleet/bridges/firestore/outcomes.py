"""What became of a document's code, read from what its job handed over or from how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from tpufleet.bridges.firestore.documents import Status
from tpufleet.errors import BadInput
from tpufleet.model.encoding import from_json
from tpufleet.model.jobs import JobState
from tpufleet.model.views import JobRow

LONGEST_ERROR = 96 * 1024  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class Handed:
    """The file that the supervisor of the code leaves."""

    status: str
    result: str | None = None
    error: str | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    status: Status
    result: str | None = None
    error: str | None = None
    seconds: float | None = None  # that the code ran


def read(handed: bytes) -> Outcome:
    """Code can write this file where it runs as the one who supervises it, so nothing in it is
    believed beyond the document's own outcome."""
    try:
        told = from_json(handed, Handed)
    except BadInput as error:
        return _failed(f"the job handed over something that is no outcome: {error}")
    if told.status == Status.COMPLETED:
        return Outcome(status=Status.COMPLETED, result=told.result, seconds=told.seconds)
    words = told.error or "the code failed, and did not say how"
    return Outcome(
        status=Status.FAILED, error=words[:LONGEST_ERROR], seconds=told.seconds
    )


def of_ended_job(row: JobRow) -> Outcome:
    """The outcome of a job that has ended and handed nothing over."""
    match row.state:
        case JobState.CANCELLED:
            return _failed(f"cancelled: {row.reason}")
        case JobState.SUCCEEDED:
            return _failed("the job ended without handing over a result")
        case _:
            return _failed(f"the job failed: {row.reason}")


def _failed(error: str) -> Outcome:
    return Outcome(status=Status.FAILED, error=error[:LONGEST_ERROR])
