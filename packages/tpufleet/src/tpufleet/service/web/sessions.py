"""Browser sessions. A cookie names a user token by its hash and a session by its id, and is signed
with the server secret, so every server accepts it. The session is stored with the user's tokens: it
ends when it is revoked or its browser logs out, and when its token is revoked or expires."""

from __future__ import annotations

import base64
import binascii
import secrets
from datetime import UTC, datetime, timedelta
from http.cookies import CookieError, SimpleCookie

from tpufleet.errors import Forbidden, Unauthorized
from tpufleet.service.transport.auth import SESSION_ENDED, base64url, equal, mac
from tpufleet.stores.base import Store

COOKIE = "tpufleet_session"
CSRF_HEADER = "x-tpufleet-csrf"
LIFETIME = timedelta(days=7)
LINK_LIFETIME = timedelta(minutes=2)
LINK_PREFIX = "tpl_"
SAFE_METHODS = frozenset({"GET", "HEAD"})
USED_LINKS = "login-links/"  # prefix of the objects that record their use
# Far longer than a link lasts, because the clocks of servers differ.
USED_LINKS_KEPT = timedelta(hours=1)


def sign_cookie(secret: bytes, token_hash: str, session_id: str, now: datetime) -> str:
    return _sign(secret, "session", f"{token_hash}.{session_id}", now + LIFETIME)


def read_cookie(secret: bytes, cookie: str, now: datetime) -> tuple[str, str]:
    """The hash of the user token, and the id of the session."""
    value = _verify(secret, "session", cookie, now)
    token_hash, _, session_id = (value or "").partition(".")
    if not session_id:
        raise Unauthorized(SESSION_ENDED)
    return token_hash, session_id


def csrf_token(secret: bytes, cookie: str) -> str:
    """Sent once, in the response to a login, so a request that has it comes from the page that
    logged in. The cookie alone does not get it: browsers send cookies to every port of a machine,
    also to those that jobs listen on."""
    return _signature(secret, f"csrf:{cookie}")


def check_csrf(secret: bytes, cookie: str, sent: str | None) -> None:
    if not equal(csrf_token(secret, cookie), sent or ""):
        raise Forbidden("the request does not come from the page; reload it, and try again")


def cookie_from(header: str | None) -> str | None:
    """The session cookie in a Cookie header."""
    try:
        morsel = SimpleCookie(header or "").get(COOKIE)
    except CookieError:
        return None
    return morsel.value if morsel is not None else None


class LoginLinks:
    """Codes that log a browser in, once, within two minutes. Shown by `tpu dash`. Their use is
    recorded in the store, for all servers and after a restart."""

    def __init__(self, secret: bytes, store: Store) -> None:
        self._secret = secret
        self._store = store

    def create(self, token_hash: str, now: datetime) -> str:
        nonce = secrets.token_hex(8)
        signed = _sign(self._secret, "link", f"{token_hash}.{nonce}", now + LINK_LIFETIME)
        return LINK_PREFIX + signed

    def redeem(self, code: str, now: datetime) -> str:
        """The hash of the user token. Writes to the store, if the code is valid."""
        value = _verify(self._secret, "link", code.removeprefix(LINK_PREFIX), now)
        token_hash, _, nonce = (value or "").partition(".")
        # Of several callers, only one creates the object.
        if value is None or not self._store.put_object(USED_LINKS + nonce, b"", now):
            raise Unauthorized("the login link was used already, or is older than 2 minutes")
        used = self._store.objects(USED_LINKS)
        old = [each.name for each in used if now - each.at > USED_LINKS_KEPT]
        if old:
            self._store.delete_objects(old)
        return token_hash


def _sign(secret: bytes, purpose: str, value: str, expires: datetime) -> str:
    payload = f"{value}|{int(expires.timestamp())}"
    return f"{base64url(payload.encode())}.{_signature(secret, f'{purpose}:{payload}')}"


def _verify(secret: bytes, purpose: str, signed: str, now: datetime) -> str | None:
    encoded, _, signature = signed.partition(".")
    try:
        padded = encoded + "=" * (-len(encoded) % 4)
        payload = base64.urlsafe_b64decode(padded).decode("ascii")
    except (binascii.Error, ValueError):
        return None
    if base64url(payload.encode()) != encoded:  # decoding ignores stray characters
        return None
    expected = _signature(secret, f"{purpose}:{payload}")
    if not equal(expected, signature):
        return None
    value, _, expires = payload.rpartition("|")
    return value if now < datetime.fromtimestamp(int(expires), UTC) else None


def _signature(secret: bytes, text: str) -> str:
    return mac(secret, f"web:{text}")
