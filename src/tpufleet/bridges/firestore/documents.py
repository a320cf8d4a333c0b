"""Documents of the collection: what a client may write, what we write, and in which order."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.model.jobs import JobId

COLLECTION = "tpu_jobs"
DEFAULT_TIMEOUT = 300  # seconds
MAX_TIMEOUT = 7 * 24 * 3600
MAX_DOCUMENT_BYTES = 1024 * 1024  # bytes; Firestore's own limit for one document
_SPARE = 32 * 1024  # for what Firestore counts and we do not: names, indexes, our own small fields


class DocumentStatus(StrEnum):
    PENDING = "pending"  # the client wants it run
    SCHEDULED = "scheduled"  # a bridge has claimed it; the fleet finds it a slice
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


LIVE_STATUSES = (DocumentStatus.PENDING, DocumentStatus.SCHEDULED, DocumentStatus.RUNNING)
_ORDER = {status: place for place, status in enumerate(DocumentStatus)}


class _Now:
    """Stands for the moment of the write, by Firestore's clock."""


SERVER_TIME = _Now()
Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentClaim:
    """Who drives a document. `fence` grows with each change of hands, so that a bridge that was
    thought dead can write nothing when it wakes; `run` grows when a client asks once more."""

    holder: str
    fence: int
    run_number: int
    job_id: JobId

    def to_fields(self) -> Fields:
        return {
            "holder": self.holder,
            "fence": self.fence,
            "run": self.run_number,
            "job": self.job_id,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    id: str
    path: str  # with project and database: no other document anywhere has it
    data: Mapping[str, Any]
    created_at: datetime  # by Firestore, and never changed
    updated_at: datetime  # when it was last written

    @property
    def status(self) -> str:
        return str(self.data.get("status"))

    @property
    def claim(self) -> DocumentClaim | None:
        return parse_claim(self.data)

    @property
    def cancel_requested(self) -> bool:
        return self.data.get("cancel_requested") is True


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeRequest:
    """What a client asks for."""

    code: str
    challenge_number: int
    timeout: float  # seconds that the code may run


def parse_request(data: Mapping[str, Any]) -> CodeRequest:
    """BadInput names every field that cannot be right."""
    faults: list[str] = []
    code = data.get("code")
    if not isinstance(code, str) or not code.strip():
        faults.append("code: Python source is needed, as text")
    challenge = _whole(data.get("challenge_number"))
    if challenge is None:
        faults.append("challenge_number: a whole number is needed")
    timeout = data.get("timeout", DEFAULT_TIMEOUT)
    timeout = DEFAULT_TIMEOUT if timeout is None else timeout
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        faults.append("timeout: a number of seconds is needed")
    elif not 0 < timeout <= MAX_TIMEOUT:  # NaN is not either
        faults.append(f"timeout: more than 0 and at most {MAX_TIMEOUT} seconds")
    if faults:
        raise BadInput("; ".join(faults))
    assert isinstance(code, str) and challenge is not None
    return CodeRequest(code=code, challenge_number=challenge, timeout=timeout)


def _whole(value: Any) -> int | None:
    """Clients in JavaScript have one kind of number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def parse_claim(data: Mapping[str, Any]) -> DocumentClaim | None:
    """None also when the field is not what a bridge writes: clients can write it too."""
    plain = data.get("bridge")
    if not isinstance(plain, Mapping):
        return None
    holder, fence, run, job = (plain.get(name) for name in ("holder", "fence", "run", "job"))
    texts = isinstance(holder, str) and isinstance(job, str)
    if not texts or type(fence) is not int or type(run) is not int:
        return None
    return DocumentClaim(holder=holder, fence=fence, run_number=run, job_id=JobId(job))


def job_id(document: Document, run: int) -> JobId:
    """The same for every bridge, and for no other document: a claim made twice is one job.

    The moment of creation is in it, for a document may be deleted and another made by its name.
    """
    named = f"{document.path}\0{document.created_at.isoformat()}\0{run}"
    digest = hashlib.sha256(named.encode()).digest()
    return JobId("fs-" + base64.b32encode(digest[:15]).decode().lower())


def next_claim(document: Document, holder: str) -> DocumentClaim | None:
    """The claim that this holder would make: on a document that waits, or after a dead holder."""
    before = document.claim
    if document.status == DocumentStatus.PENDING:
        fence, run = (0, 0) if before is None else (before.fence + 1, before.run_number + 1)
    elif before is None or document.status not in LIVE_STATUSES:
        return None
    elif before.holder == holder:  # ours already: only the answer to our claim was lost
        fence, run = before.fence, before.run_number
    else:
        fence, run = before.fence + 1, before.run_number
    return DocumentClaim(holder=holder, fence=fence, run_number=run, job_id=job_id(document, run))


def claim_fields(document: Document, claim: DocumentClaim) -> Fields:
    """What a claim writes. Taking over changes who drives, not where the document stands."""
    if claim == document.claim:
        return {}
    fields: Fields = {"bridge": claim.to_fields(), "updated_at": SERVER_TIME}
    if document.status != DocumentStatus.PENDING:
        return fields
    fields |= {"status": DocumentStatus.SCHEDULED.value, "scheduled_at": SERVER_TIME}
    if document.data.get("created_at") is None:
        fields["created_at"] = document.created_at  # lists are sorted by it
    if claim.run_number > 0:  # asked for once more: what it came to before is history
        fields |= {"started_at": None, "completed_at": None, "result": None, "error": None}
    return fields


def running_fields(started: datetime | None) -> Fields:
    return {
        "status": DocumentStatus.RUNNING.value,
        "started_at": started or SERVER_TIME,
        "updated_at": SERVER_TIME,
    }


def ended_fields(status: DocumentStatus, result: str | None, error: str | None) -> Fields:
    return {
        "status": status.value,
        "result": result,
        "error": error,
        "completed_at": SERVER_TIME,
        "updated_at": SERVER_TIME,
    }


def is_forward(before: str, after: str) -> bool:
    """No status is ever written over one that comes after it."""
    known = before in _ORDER and after in _ORDER
    return (
        known
        and before in LIVE_STATUSES
        and _ORDER[DocumentStatus(after)] > _ORDER[DocumentStatus(before)]
    )


def max_result_bytes(data: Mapping[str, Any]) -> int:
    """How many bytes of text the document can still take."""
    return max(0, MAX_DOCUMENT_BYTES - _SPARE - _size({**data, "result": None, "error": None}))


def _size(value: Any) -> int:
    match value:
        case str():
            return len(value.encode("utf-8", "replace")) + 1
        case bytes():
            return len(value)
        case Mapping():
            return sum(_size(str(name)) + _size(item) for name, item in value.items()) + 32
        case list() | tuple():
            return sum(_size(item) for item in value)
        case _:
            return 32
