"""Signed links: they let whoever has one read one file of a job without a token, until they expire.

A link is signed with the server secret, so that every server accepts it and nothing is stored. It
stops working when the user who created it is deleted.
"""

from __future__ import annotations

import base64
import hmac
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qsl, urlencode

from tpufleet.errors import BadInput, Unauthorized
from tpufleet.model.users import Role, TokenScope
from tpufleet.service.auth import Caller
from tpufleet.stores.base import Store

MAX_LIFETIME = timedelta(days=90)
_PARAMS = ("user", "expires", "signature")


def sign(path: str, user: str, expires_at: datetime, secret: bytes) -> str:
    """The path with the query that makes it readable without a token."""
    expires = str(int(expires_at.timestamp()))
    signature = _signature(path, user, expires, secret)
    return f"{path}?{urlencode({'user': user, 'expires': expires, 'signature': signature})}"


def check_lifetime(lifetime: timedelta) -> None:
    if not timedelta(0) < lifetime <= MAX_LIFETIME:
        raise BadInput(f"expires_in: must be more than zero and at most {MAX_LIFETIME.days} days")


def signature_of(method: str, query: bytes) -> str | None:
    """The signature in a query; None when the request has none and needs a token."""
    return dict(_pairs(query)).get("signature") if method in ("GET", "HEAD") else None


def authenticate(path: str, query: bytes, secret: bytes, store: Store, now: datetime) -> Caller:
    """The user who created the link, with the right to read."""
    params = dict(_pairs(query))
    user, expires, signature = (params.get(name, "") for name in _PARAMS)
    if not hmac.compare_digest(_signature(path, user, expires, secret), signature.encode()):
        raise Unauthorized("invalid link: its signature does not match")
    moment = datetime.fromtimestamp(int(expires), UTC)
    if moment <= now:
        raise Unauthorized(
            f"the link expired on {moment:%Y-%m-%d %H:%M} UTC; ask {user} for a new one, or send a "
            "token"
        )
    if store.user(user) is None:
        raise Unauthorized(f"the link is no longer valid: user {user} was deleted")
    return Caller(name=user, role=Role.VIEWER, token_id="link", scope=TokenScope.READ)


def without_signature(query: bytes) -> bytes:
    """The parameters of the route itself."""
    return urlencode(
        [(name, value) for name, value in _pairs(query) if name not in _PARAMS]
    ).encode()


def _pairs(query: bytes) -> list[tuple[str, str]]:
    return parse_qsl(query.decode("latin-1"), keep_blank_values=True)


def _signature(path: str, user: str, expires: str, secret: bytes) -> bytes:
    text = f"link:{path}:{expires}:{user}"
    return base64.urlsafe_b64encode(hmac.digest(secret, text.encode(), "sha256")).rstrip(b"=")
