"""The audit log: who changed access to this fleet or what belongs to another user, and when."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class AuditAction(StrEnum):
    PUT_USER = "user.put"
    DELETE_USER = "user.delete"
    CREATE_TOKEN = "token.create"
    ROTATE_TOKEN = "token.rotate"
    REVOKE_TOKEN = "token.revoke"
    CREATE_SESSION = "session.create"  # a browser logs in
    DELETE_SESSION = "session.delete"
    CREATE_LOGIN_LINK = "session.link"
    CREATE_LINK = "link.create"  # to the logs or the result of a job, without a token
    PUT_SECRET = "secret.put"
    DELETE_SECRET = "secret.delete"
    PUT_CHANNEL = "notify.put"
    DELETE_CHANNEL = "notify.delete"
    EXEC = "slice.exec"
    INJECT_FAULT = "slice.fault"
    ADOPT_NODE = "node.adopt"
    UNREGISTER_NODE = "node.unregister"
    PUT_POOL = "pool.put"
    DELETE_POOL = "pool.delete"
    # Entered when an admin does it to what belongs to another user, or when it is refused.
    SUBMIT_JOB = "job.submit"
    EDIT_JOB = "job.edit"
    CANCEL_JOB = "job.cancel"
    RESUME_JOB = "job.resume"
    RERUN_JOB = "job.rerun"
    ARCHIVE_JOBS = "job.archive"
    UNARCHIVE_JOBS = "job.unarchive"
    PURGE_JOBS = "job.purge"
    MOVE_JOB = "queue.move"
    HOLD_JOB = "queue.hold"
    RELEASE_JOB = "queue.release"
    RETRY_JOB = "queue.retry"
    CREATE_RESERVATION = "reservation.create"
    CHANGE_RESERVATION = "reservation.change"
    DELETE_RESERVATION = "reservation.delete"
    RELEASE_SLICE = "slice.release"
    READ_PREFERENCES = "preferences.read"
    CHANGE_PREFERENCES = "preferences.change"
    REQUEST = "request"  # any other request that was refused


class AuditOutcome(StrEnum):
    REQUESTED = "requested"  # written before it is carried out
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditEntry:
    """Never changed or deleted. Has no secret values."""

    at: datetime
    actor: str  # user
    token_id: str
    address: str  # from which the request came
    action: AuditAction
    target: str  # name or id of the user, token, secret, slice, pool or job
    detail: str = ""
    outcome: AuditOutcome = AuditOutcome.REQUESTED
    seq: int = 0  # numbered by the store
