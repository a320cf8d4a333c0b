"""Who is calling. User tokens are kept as hashes; slice tokens follow from the server secret and
are kept nowhere."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from tpufleet.errors import Forbidden, Unauthorized
from tpufleet.model.slices import SliceId
from tpufleet.model.users import Role, Token
from tpufleet.stores.base import Store

TOKEN_PREFIX = "tpf_"
_RANK = {Role.VIEWER: 0, Role.MEMBER: 1, Role.ADMIN: 2}
_NOTE_USE_EVERY = timedelta(minutes=5)  # a write for each call would cost more than it tells


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    name: str
    role: Role
    token_id: str = ""

    @property
    def is_admin(self) -> bool:
        return self.role is Role.ADMIN

    def require_role(self, role: Role) -> None:
        if _RANK[self.role] < _RANK[role]:
            raise Forbidden(
                f"{self.name} is a {self.role}, and this needs a {role}; "
                "an admin changes roles with `tpu user`"
            )

    def require_owner(self, owner: str, what: str) -> None:
        if self.name != owner and not self.is_admin:
            raise Forbidden(f"{what} belongs to {owner}; only they or an admin may change it")


def new_token() -> str:
    return TOKEN_PREFIX + _base64url(secrets.token_bytes(32))


def token_hash(token: str) -> str:
    # The token is 256 random bits, so a plain hash cannot be guessed backwards.
    return hashlib.sha256(token.encode()).hexdigest()


def slice_token(secret: bytes, slice_id: SliceId) -> str:
    """What the agents of a slice prove themselves with."""
    return _base64url(hmac.digest(secret, f"slice:{slice_id}".encode(), "sha256"))


def bootstrap_token(secret: bytes, slice_id: SliceId) -> str:
    """What each host of a slice may get the slice's token for, once."""
    return _base64url(hmac.digest(secret, f"entry:{slice_id}".encode(), "sha256"))


def is_slice_token(token: str, secret: bytes, slice_id: SliceId) -> bool:
    return _equal(slice_token(secret, slice_id), token)


def is_bootstrap_token(token: str, secret: bytes, slice_id: SliceId) -> bool:
    return _equal(bootstrap_token(secret, slice_id), token)


def _equal(expected: str, token: str) -> bool:
    return hmac.compare_digest(expected.encode(), token.encode())


def bearer_token(header: str | None) -> str:
    """The token of an Authorization header."""
    scheme, _, token = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthorized("no token; send `Authorization: Bearer …`, or run `tpu token` for one")
    return token.strip()


def authenticate(token: str, store: Store) -> tuple[Caller, Token]:
    found = store.token_by_hash(token_hash(token)) if token.startswith(TOKEN_PREFIX) else None
    user = store.user(found.user) if found is not None else None
    if found is None or user is None:
        raise Unauthorized("this token is not known here; it may have been withdrawn")
    return Caller(name=user.name, role=user.role, token_id=found.id), found


def use_record_is_stale(token: Token, now: datetime) -> bool:
    """Its last use was noted too long ago."""
    return token.last_used_at is None or now - token.last_used_at > _NOTE_USE_EVERY


def record_use(token: Token, store: Store, now: datetime) -> None:
    store.refresh_token(replace(token, last_used_at=now))


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
