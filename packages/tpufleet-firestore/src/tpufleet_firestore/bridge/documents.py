"""Documents of the collection: what clients may write, what bridges write, and in which order."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tpufleet.errors import BadInput
from tpufleet.model.job.jobs import JobId

COLLECTION = "tpu_jobs"
DEFAULT_TIMEOUT = 300  # seconds
MAX_TIMEOUT = 7 * 24 * 3600
MAX_COUNT = 2**53  # exact in JavaScript, and far from Firestore's limit
MAX_DOCUMENT_BYTES = 1024 * 1024  # Firestore's limit
_RESERVED_BYTES = 3 * 1024  # for the bridge's fields except `result` and `error`
REQUIRED_FREE_BYTES = _RESERVED_BYTES + 1024  # in a document before it runs
# What bridges write, so what a rerun replaces.
_BRIDGE_FIELDS = frozenset(
    {"bridge", "scheduled_at", "started_at", "completed_at", "updated_at", "result", "error"}
    | {"log_url", "result_url", "seconds"}
)


class DocumentStatus(StrEnum):
    PENDING = "pending"  # written by the client
    SCHEDULED = "scheduled"  # claimed by a bridge; its job waits for a slice
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


LIVE_STATUSES = (DocumentStatus.PENDING, DocumentStatus.SCHEDULED, DocumentStatus.RUNNING)
_ORDER = {status: position for position, status in enumerate(DocumentStatus)}


class _ServerTime:
    """Placeholder for the time of the write, by Firestore's clock."""


SERVER_TIME = _ServerTime()
Fields = dict[str, Any]


class DocumentClaim(
    msgspec.Struct, frozen=True, kw_only=True, rename={"run_number": "run", "job_id": "job"}
):
    """Which bridge holds a document. `fence` is a fencing token that grows with every takeover, so
    that a bridge that was presumed dead cannot write; `run_number` grows with every rerun."""

    # Names a document too, so what Firestore refuses as an ID is no holder.
    holder: Annotated[str, Meta(pattern=r"^(?!\.\.?$|__.*__$)[^/]+$", max_length=300)]
    fence: Annotated[int, Meta(ge=0, le=MAX_COUNT)]
    run_number: Annotated[int, Meta(ge=0, le=MAX_COUNT)]
    job_id: JobId

    def to_fields(self) -> Fields:
        return msgspec.to_builtins(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    id: str
    path: str  # with project and database, so globally unique
    data: Mapping[str, Any]
    created_at: datetime  # set by Firestore; never changes
    updated_at: datetime  # set by Firestore at every write
    read_at: datetime  # by Firestore's clock

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
    """The code that a client wants to run."""

    code: str
    challenge_number: int
    timeout: float  # seconds


def parse_request(data: Mapping[str, Any]) -> CodeRequest:
    """BadInput names every invalid field."""
    errors: list[str] = []
    code = data.get("code")
    if not isinstance(code, str) or not code.strip():
        errors.append("code: expected Python source as text")
    challenge = _whole_number(data.get("challenge_number"))
    if challenge is None:
        errors.append("challenge_number: expected a whole number")
    timeout = data.get("timeout", DEFAULT_TIMEOUT)
    timeout = DEFAULT_TIMEOUT if timeout is None else timeout
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout <= MAX_TIMEOUT:  # also false for NaN
        errors.append(f"timeout: expected a number above 0, of at most {MAX_TIMEOUT} seconds")
    if data.get("bridge") is not None and parse_claim(data) is None:
        errors.append("bridge: is written by the bridge only; remove it")
    if errors:
        raise BadInput("; ".join(errors))
    assert isinstance(code, str) and challenge is not None
    return CodeRequest(code=code, challenge_number=challenge, timeout=timeout)


def _whole_number(value: Any) -> int | None:
    """JavaScript clients have only floating-point numbers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def parse_claim(data: Mapping[str, Any]) -> DocumentClaim | None:
    """None also when the field is invalid: clients can write it too."""
    try:
        return msgspec.convert(data.get("bridge"), DocumentClaim)
    except msgspec.ValidationError:
        return None


def job_id(document: Document, run_number: int) -> JobId:
    """Deterministic and unique to the document, so that two claims of it are one job.

    Includes the creation time, because a deleted document's name may be reused.
    """
    name = f"{document.path}\0{document.created_at.isoformat()}\0{run_number}"
    digest = hashlib.sha256(name.encode()).digest()
    return JobId("fs-" + base64.b32encode(digest[:15]).decode().lower())


def check_free_space(document: Document) -> None:
    """BadInput unless what the bridge writes fits into the document too."""
    size = document_bytes(document) - _bridge_bytes(document)
    if MAX_DOCUMENT_BYTES - size < REQUIRED_FREE_BYTES:
        raise BadInput(
            f"the document is too large: {size} bytes; it must leave {REQUIRED_FREE_BYTES} of "
            f"{MAX_DOCUMENT_BYTES} bytes for its outcome"
        )


def is_abandoned(document: Document, adopt_after: timedelta) -> bool:
    """Whether the former worker left it: it is `scheduled` or `running` without a bridge, and has
    not changed for its timeout and `adopt_after`."""
    taken = document.status in LIVE_STATUSES and document.status != DocumentStatus.PENDING
    if not taken or document.claim is not None:
        return False
    try:
        timeout = parse_request(document.data).timeout
    except BadInput:  # it fails when it is claimed
        timeout = DEFAULT_TIMEOUT
    unchanged = document.read_at - document.updated_at
    return unchanged > timedelta(seconds=timeout) + adopt_after


def next_claim(document: Document, holder: str) -> DocumentClaim | None:
    """The claim with which `holder` takes a document that is pending or abandoned, or takes over
    from a dead bridge."""
    before = document.claim
    if document.status == DocumentStatus.PENDING:
        fence, run = (0, 0) if before is None else (_next(before.fence), _next(before.run_number))
    elif document.status not in LIVE_STATUSES:
        return None
    elif before is None:
        fence, run = 0, 0
    elif before.holder == holder:  # already claimed; only the response was lost
        fence, run = before.fence, before.run_number
    else:
        fence, run = _next(before.fence), before.run_number
    return DocumentClaim(holder=holder, fence=fence, run_number=run, job_id=job_id(document, run))


def _next(count: int) -> int:
    """Valid again, also when a client wrote the largest valid count: only equality matters."""
    return (count + 1) % (MAX_COUNT + 1)


def claim_fields(document: Document, claim: DocumentClaim) -> Fields:
    """What a claim writes. A takeover changes the holder, not the status."""
    if claim == document.claim:
        return {}
    fields: Fields = {"bridge": claim.to_fields(), "updated_at": SERVER_TIME}
    if document.status != DocumentStatus.PENDING:
        return fields
    fields |= {"status": DocumentStatus.SCHEDULED.value, "scheduled_at": SERVER_TIME}
    if document.data.get("created_at") is None:
        fields["created_at"] = document.created_at  # listings sort by it
    if document.claim is not None:  # a rerun clears the previous result
        fields |= {"started_at": None, "completed_at": None, "result": None, "error": None}
    return fields


def running_fields(started_at: datetime | None) -> Fields:
    return {
        "status": DocumentStatus.RUNNING.value,
        "started_at": started_at or SERVER_TIME,
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
    """A status may only be replaced by a later one."""
    if before not in LIVE_STATUSES or after not in _ORDER:
        return False
    return _ORDER[DocumentStatus(after)] > _ORDER[DocumentStatus(before)]


def max_text_bytes(document: Document) -> int:
    """How many bytes of result or error still fit into the document."""
    size = document_bytes(document) - _bridge_bytes(document)
    return max(0, MAX_DOCUMENT_BYTES - _RESERVED_BYTES - size)


def document_bytes(document: Document) -> int:
    """Its size, from https://firebase.google.com/docs/firestore/storage-size"""
    name = document.path.split("/")[2:]  # without project and database
    return sum(_size(part) for part in name) + 16 + _size(document.data) + 32


def _bridge_bytes(document: Document) -> int:
    return _size({name: document.data[name] for name in _BRIDGE_FIELDS & document.data.keys()})


def _size(value: Any) -> int:
    match value:
        case str():
            return len(value.encode("utf-8", "replace")) + 1
        case bytes():
            return len(value)
        case Mapping():
            return sum(_size(str(name)) + _size(item) for name, item in value.items())
        case list() | tuple():
            return sum(_size(item) for item in value)
        case bool() | None:
            return 1
        case int() | float() | datetime() | _ServerTime():
            return 8
        case _:  # a point takes 16 bytes, a reference its name; a vector is larger than either
            return 16
