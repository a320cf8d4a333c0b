"""Sessions of browsers: log in with a token or a link, and log out."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.responses import Response

from tpufleet.errors import NotFound
from tpufleet.model.api_types import BrowserSession, LoginLink
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.users import Role
from tpufleet.model.values.encoding import to_json
from tpufleet.service.operations.server_status import AboutServer
from tpufleet.service.people import user_commands
from tpufleet.service.transport.routing import ApiCall, MediaType, Router, ServerSecret
from tpufleet.service.web import sessions
from tpufleet.service.web.sessions import LoginLinks

router = Router()


@router.post("/session", Role.VIEWER, response=BrowserSession, audit=AuditAction.CREATE_SESSION)
def create_session(call: ApiCall, secret: ServerSecret, server: AboutServer) -> Response:
    """Log a browser in: sets a cookie that stands for the token of this request."""
    session_id = user_commands.create_session(call.context, sessions.LIFETIME)
    cookie = sessions.sign_cookie(secret, call.token_hash, session_id, call.now)
    csrf = sessions.csrf_token(secret, cookie)
    response = _session_response(call, session_id, csrf)
    response.set_cookie(
        sessions.COOKIE,
        cookie,
        max_age=int(sessions.LIFETIME.total_seconds()),
        httponly=True,
        samesite="strict",
        secure=_is_encrypted(call, server.public_url),
    )
    return response


def _is_encrypted(call: ApiCall, public_url: str) -> bool:
    """Between the browser and this server, or a proxy in front of it that does not say so."""
    public, asked = urlsplit(public_url), call.request.url
    return asked.scheme == "https" or (
        public.scheme == "https" and public.hostname == (asked.hostname or "").lower()
    )


@router.get("/session", Role.VIEWER, response=BrowserSession)
def get_session(call: ApiCall) -> Response:
    """The session of this browser."""
    if sessions.cookie_from(call.request.headers.get("cookie")) is None:
        raise NotFound("no session; log in with a token")
    return _session_response(call, call.user.session_id)


@router.delete("/session", Role.VIEWER, response=dict, audit=AuditAction.DELETE_SESSION)
def delete_session(call: ApiCall) -> Response:
    """Log this browser out: its cookie is no longer accepted."""
    user_commands.delete_session(call.context)
    response = Response(b"{}", media_type=MediaType.JSON.value)
    response.delete_cookie(sessions.COOKIE, httponly=True, samesite="strict")
    return response


@router.post("/session/link", Role.VIEWER, audit=AuditAction.CREATE_LOGIN_LINK)
def create_login_link(call: ApiCall, links: LoginLinks) -> LoginLink:
    """A path that logs a browser in as the caller, once, within two minutes."""
    code = links.create(call.token_hash, call.now)
    return LoginLink(path=f"/#/login/{code}")


def _session_response(call: ApiCall, session_id: str, csrf: str = "") -> Response:
    user = call.user
    session = BrowserSession(user=user.name, role=user.role, csrf=csrf, id=session_id)
    response = Response(to_json(session), media_type=MediaType.JSON.value)
    response.headers["Cache-Control"] = "no-store"
    return response
