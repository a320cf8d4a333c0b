"""Users, roles and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class Role(StrEnum):
    VIEWER = "viewer"  # sees everything, changes nothing
    MEMBER = "member"  # runs jobs, and changes their own
    ADMIN = "admin"  # changes anything


TOKEN_PREFIX = "tpf_"  # lets secret scanners recognise a token
JOB_TOKEN_PREFIX = "tpj_"  # of the token that the processes of an attempt get


class TokenScope(StrEnum):
    FULL = "full"  # all that its user may do
    READ = "read"  # reads what its user may read, changes nothing
    SUBMIT = "submit"  # submits jobs, and follows and cancels those of its user; nothing else


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    name: str
    role: Role
    created_at: datetime
    service: bool = False  # a program: an admin creates its tokens, and they expire


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A credential. Only its hash is stored."""

    id: str
    user: str
    hash: str
    created_at: datetime
    note: str = ""
    last_used_at: datetime | None = None
    expires_at: datetime | None = None  # None: never
    scope: TokenScope = TokenScope.FULL
    replaced_by: str | None = None  # id of the token that it was rotated to
    session_of: str | None = None  # of a browser session: id of the token that logged it in
    created_by: tuple[str, ...] = ()  # ids of the token and session it was created with, and theirs

    def expired(self, now: datetime) -> bool:
        return self.expires_at is not None and now >= self.expires_at
