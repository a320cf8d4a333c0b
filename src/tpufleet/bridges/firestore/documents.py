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
LONGEST_TIMEOUT = 7 * 24 * 3600
LARGEST = 1024 * 1024  # bytes; Firestore's own limit for one document
_SPARE = 32 * 1024  # for what Firestore counts and we do not: names, indexes, our own small fields


class Status(StrEnum):
    PENDING = "pending"  # the client wants it run
    SCHEDULED = "scheduled"  # a bridge has claimed it; the fleet finds it a slice
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


LIVE = (Status.PENDING, Status.SCHEDULED, Status.RUNNING)
_ORDER = {status: place for place, status in enumerate(Status)}


class _Now:
    """Stands for the moment of the write, by Firestore's clock."""


NOW = _Now()
Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Who drives a document. `fence` grows with each change of hands, so that a bridge that was
    thought dead can write nothing when it wakes; `run` grows when a client asks once more."""

    holder: str
    fence: int
    run: int
    job: JobId

    def plain(self) -> Fields:
        return {"holder": self.holder, "fence": self.fence, "run": self.run, "job": self.job}


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    id: str
    path: str  # with project and database: no other document anywhere has it
    data: Mapping[str, Any]
    created: datetime  # by Firestore, and never changed
    version: datetime  # when it was last written

    @property
    def status(self) -> str:
        return str(self.data.get("status"))

    @property
    def claim(self) -> Claim | None:
        return claim_of(self.data)

    @property
    def wants_cancel(self) -> bool:
        return self.data.get("cancel_requested") is True


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a client asks for."""

    code: str
    challenge_number: int
    timeout: float  # seconds that the code may run


def request_of(data: Mapping[str, Any]) -> Request:
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
    elif not 0 < timeout <= LONGEST_TIMEOUT:  # NaN is not either
        faults.append(f"timeout: more than 0 and at most {LONGEST_TIMEOUT} seconds")
    if faults:
        raise BadInput("; ".join(faults))
    assert isinstance(code, str) and challenge is not None
    return Request(code=code, challenge_number=challenge, timeout=timeout)


def _whole(value: Any) -> int | None:
    """Clients in JavaScript have one kind of number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def claim_of(data: Mapping[str, Any]) -> Claim | None:
    """None also when the field is not what a bridge writes: clients can write it too."""
    plain = data.get("bridge")
    if not isinstance(plain, Mapping):
        return None
    holder, fence, run, job = (plain.get(name) for name in ("holder", "fence", "run", "job"))
    texts = isinstance(holder, str) and isinstance(job, str)
    if not texts or type(fence) is not int or type(run) is not int:
        return None
    return Claim(holder=holder, fence=fence, run=run, job=JobId(job))


def job_id(document: Document, run: int) -> JobId:
    """The same for every bridge, and for no other document: a claim made twice is one job.

    The moment of creation is in it, for a document may be deleted and another made by its name.
    """
    named = f"{document.path}\0{document.created.isoformat()}\0{run}"
    digest = hashlib.sha256(named.encode()).digest()
    return JobId("fs-" + base64.b32encode(digest[:15]).decode().lower())


def claimed(document: Document, holder: str) -> Claim | None:
    """The claim that this holder would make: on a document that waits, or after a dead holder."""
    before = document.claim
    if document.status == Status.PENDING:
        fence, run = (0, 0) if before is None else (before.fence + 1, before.run + 1)
    elif before is None or document.status not in LIVE:
        return None
    elif before.holder == holder:  # ours already: only the answer to our claim was lost
        fence, run = before.fence, before.run
    else:
        fence, run = before.fence + 1, before.run
    return Claim(holder=holder, fence=fence, run=run, job=job_id(document, run))


def on_claim(document: Document, claim: Claim) -> Fields:
    """What a claim writes. Taking over changes who drives, not where the document stands."""
    if claim == document.claim:
        return {}
    fields: Fields = {"bridge": claim.plain(), "updated_at": NOW}
    if document.status != Status.PENDING:
        return fields
    fields |= {"status": Status.SCHEDULED.value, "scheduled_at": NOW}
    if document.data.get("created_at") is None:
        fields["created_at"] = document.created  # lists are sorted by it
    if claim.run > 0:  # asked for once more: what it came to before is history
        fields |= {"started_at": None, "completed_at": None, "result": None, "error": None}
    return fields


def on_running(started: datetime | None) -> Fields:
    return {
        "status": Status.RUNNING.value,
        "started_at": started or NOW,
        "updated_at": NOW,
    }


def on_end(status: Status, result: str | None, error: str | None) -> Fields:
    return {
        "status": status.value,
        "result": result,
        "error": error,
        "completed_at": NOW,
        "updated_at": NOW,
    }


def goes_forward(before: str, after: str) -> bool:
    """No status is ever written over one that comes after it."""
    known = before in _ORDER and after in _ORDER
    return known and before in LIVE and _ORDER[Status(after)] > _ORDER[Status(before)]


def room_for_result(data: Mapping[str, Any]) -> int:
    """How many bytes of text the document can still take."""
    return max(0, LARGEST - _SPARE - _size({**data, "result": None, "error": None}))


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
