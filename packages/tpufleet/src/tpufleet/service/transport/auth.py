"""Authentication. User tokens are stored as hashes. Those of slices and of attempts are derived
from the server secret, and stored nowhere."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from tpufleet.errors import BadInput, Forbidden, Unauthorized
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.job.jobs import Job, JobId
from tpufleet.model.people.users import JOB_TOKEN_PREFIX, TOKEN_PREFIX, Role, Token, TokenScope
from tpufleet.stores.base import Store

_RANK = {Role.VIEWER: 0, Role.MEMBER: 1, Role.ADMIN: 2}
SESSION_ENDED = "the session has ended; log in again"
UNKNOWN_TOKEN = "unknown token; it may have been revoked"
_RECORD_USE_INTERVAL = timedelta(minutes=5)  # a write for every call would be too expensive


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    name: str
    role: Role
    token_id: str = ""
    scope: TokenScope = TokenScope.FULL
    job_id: JobId | None = None  # a process of this job, limited to it; `name` is its owner
    expires_at: datetime | None = None  # of its token; None: never
    session_id: str = ""  # of its browser; empty: it sent the token itself
    # Called before it acts on what belongs to another user, with that user and the object.
    on_foreign_access: Callable[[str, str], None] | None = field(
        default=None, compare=False, repr=False
    )

    @property
    def limited(self) -> bool:
        """Whether its token allows less than its role."""
        return self.scope is not TokenScope.FULL or self.job_id is not None

    @property
    def limits_key(self) -> str:
        """What its requests are counted by: all tokens of a user together. Processes of jobs are
        counted apart, so that they do not lock their owner out."""
        return f"user:{self.name}" if self.job_id is None else f"jobs:{self.name}"

    @property
    def is_admin(self) -> bool:
        return self.role is Role.ADMIN

    def require_role(self, role: Role, to: str = "this") -> None:
        if _RANK[self.role] < _RANK[role]:
            raise Forbidden(
                f"{to} requires the {role} role; {self.name} has the {self.role} role. "
                "An admin can change it with `tpu user`"
            )

    def require_admin(self, to: str) -> None:
        self.require_role(Role.ADMIN, to)

    def require_job_owner(self, job: Job) -> None:
        self.require_owner(job.owner, f"job {job.id}", f" ({job.spec.name})")

    def require_reason(self, owner: str, reason: str) -> None:
        """Of an admin who takes something from its owner."""
        if self.is_admin and self.name != owner and not reason.strip():
            raise BadInput(f"reason: missing; tell {owner} why")

    def require_owner(self, owner: str, what: str, known_as: str = "") -> None:
        if self.name != owner and not self.is_admin:
            raise Forbidden(
                f"{what}{known_as} belongs to {owner}; only {owner} or an admin may change it"
            )
        self.record_foreign_access(owner, what)

    def record_foreign_access(self, owner: str, what: str) -> None:
        """Enter into the audit log that an admin acts on what belongs to another user."""
        if self.name != owner and self.on_foreign_access is not None:
            self.on_foreign_access(owner, what)


def new_token() -> str:
    return TOKEN_PREFIX + base64url(secrets.token_bytes(32))


def token_hash(token: str) -> str:
    # The token has 256 random bits, so a plain hash cannot be reversed by guessing.
    return hashlib.sha256(token.encode()).hexdigest()


def session_hash(session_id: str) -> str:
    """In place of the hash of a token. No token has it, so a session is never accepted as one."""
    return f"session:{session_id}"


def slice_token(secret: bytes, slice_id: SliceId) -> str:
    """The token that the agents of a slice share."""
    return mac(secret, f"slice:{slice_id}")


def bootstrap_token(secret: bytes, slice_id: SliceId) -> str:
    """Each host of a slice can exchange it once for the slice token."""
    return mac(secret, f"bootstrap:{slice_id}")


def job_token(secret: bytes, attempt_id: AttemptId) -> str:
    """The token that the processes of an attempt share, valid while it is live."""
    return f"{JOB_TOKEN_PREFIX}{attempt_id}.{mac(secret, f'attempt:{attempt_id}')}"


def is_slice_token(token: str, secret: bytes, slice_id: SliceId) -> bool:
    return equal(slice_token(secret, slice_id), token)


def mac(secret: bytes, text: str) -> str:
    return base64url(hmac.digest(secret, text.encode(), "sha256"))


def equal(expected: str, token: str) -> bool:
    """In a time that does not depend on either."""
    return hmac.compare_digest(expected.encode(), token.encode())


def bearer_token(header: str | None) -> str:
    """The token of an Authorization header."""
    scheme, _, token = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthorized(
            "no token; send `Authorization: Bearer TOKEN` (create one with `tpu token`)"
        )
    return token.strip()


def authenticate(hashed: str, store: Store, now: datetime, session_id: str = "") -> Caller:
    """The user of the token with this hash. Also records its use, every few minutes. Of a browser,
    the session must not have ended either."""
    session = store.token_by_hash(session_hash(session_id)) if session_id else None
    if session_id and (session is None or session.expired(now)):
        raise Unauthorized(SESSION_ENDED)
    known, user = store.token_and_user(hashed) or (None, None)
    if known is None or user is None:
        raise Unauthorized(UNKNOWN_TOKEN)
    if known.expired(now):
        raise Unauthorized(
            f"token {known.id} expired on {known.expires_at:%Y-%m-%d}; ask an admin to run "
            f"`tpu token create --user {user.name}`"
        )
    for used in (known, *([session] if session is not None else [])):
        if used.last_used_at is None or now - used.last_used_at > _RECORD_USE_INTERVAL:
            record_use(used, store, now)
    return Caller(
        name=user.name,
        role=user.role,
        token_id=known.id,
        scope=known.scope,
        expires_at=known.expires_at,
        session_id=session_id,
    )


def authenticate_job(token: str, secret: bytes, store: Store) -> Caller:
    """A process of the live attempt whose token this is. It acts for the owner of its job, on this
    job alone, and never as an admin."""
    attempt_id = AttemptId(token.removeprefix(JOB_TOKEN_PREFIX).rpartition(".")[0])
    if not equal(job_token(secret, attempt_id), token):
        raise Unauthorized(UNKNOWN_TOKEN)
    attempt = store.attempt(attempt_id)
    job = store.job(attempt.job_id) if attempt is not None and attempt.live else None
    owner = store.user(job.owner) if job is not None else None
    if job is None or owner is None:
        raise Unauthorized(f"attempt {attempt_id} has ended, or its user was deleted")
    role = Role.MEMBER if owner.role is Role.ADMIN else owner.role
    return Caller(name=owner.name, role=role, token_id=f"job:{attempt_id}", job_id=job.id)


def record_use(token: Token, store: Store, now: datetime) -> None:
    """Changes nothing else, and does not bring back a token that was revoked meanwhile."""
    store.update_token(token.id, lambda known: replace(known, last_used_at=now))


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
