"""The audit log: who changed access to this fleet, from where, and when."""

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
    target: str  # name or id of the user, token, secret, slice or pool
    detail: str = ""
    outcome: AuditOutcome = AuditOutcome.REQUESTED
    seq: int = 0  # numbered by the store
