"""Signed links: they let whoever has one read one file of a job without a token, until they expire.

A link is signed with the server secret, so that every server accepts it and nothing is stored. It
names the token, or the session of a browser, that created it, and ends with that, or with its user.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qsl, urlencode

from tpufleet.errors import Unauthorized
from tpufleet.model.people.users import Role, TokenScope
from tpufleet.service.transport.auth import Caller, equal, mac
from tpufleet.stores.base import Store

MAX_LIFETIME = timedelta(days=90)
_PARAMS = ("user", "token", "expires", "signature")


def sign(path: str, caller: Caller, expires_at: datetime, secret: bytes) -> str:
    """The path with the query that makes it readable without a token."""
    params = {
        "user": caller.name,
        "token": caller.session_id or caller.token_id,  # the id, not the token itself
        "expires": str(int(expires_at.timestamp())),
    }
    signature = _signature(path, params["user"], params["token"], params["expires"], secret)
    return f"{path}?{urlencode({**params, 'signature': signature})}"


def signature_of(method: str, query: bytes) -> str | None:
    """The signature in a query; None when the request has none and needs a token."""
    return dict(_pairs(query)).get("signature") if method in ("GET", "HEAD") else None


def authenticate(path: str, query: bytes, secret: bytes, store: Store, now: datetime) -> Caller:
    """The user who created the link, with the right to read."""
    params = dict(_pairs(query))
    user, token_id, expires, signature = (params.get(name, "") for name in _PARAMS)
    expected = _signature(path, user, token_id, expires, secret)
    if not equal(expected, signature):
        raise Unauthorized("invalid link: its signature does not match")
    moment = datetime.fromtimestamp(int(expires), UTC)
    ended = ""
    if moment <= now:
        ended = f"the link expired on {moment:%Y-%m-%d %H:%M} UTC"
    elif not _has_token(store, user, token_id, now):
        ended = f"the link ended with its token, or with user {user}"
    if ended:
        raise Unauthorized(f"{ended}; ask for a new one, or send a token")
    return Caller(name=user, role=Role.VIEWER, token_id="link", scope=TokenScope.READ)


def _has_token(store: Store, user: str, token_id: str, now: datetime) -> bool:
    """The one that created the link, or the one that replaced it since."""
    tokens = {token.id: token for token in store.tokens(user)}
    token = tokens.get(token_id)
    if token is not None and token.session_of is not None and not token.expired(now):
        token = tokens.get(token.session_of)
    while token is not None and token.replaced_by is not None:
        token = tokens.get(token.replaced_by)
    return token is not None and not token.expired(now) and store.user(user) is not None


def without_signature(query: bytes) -> bytes:
    """The parameters of the route itself."""
    return urlencode(
        [(name, value) for name, value in _pairs(query) if name not in _PARAMS]
    ).encode()


def _pairs(query: bytes) -> list[tuple[str, str]]:
    return parse_qsl(query.decode("latin-1"), keep_blank_values=True)


def _signature(path: str, user: str, token_id: str, expires: str, secret: bytes) -> str:
    return mac(secret, f"link:{path}:{expires}:{token_id}:{user}")
