"""Sessions of browsers: log in with a token or a link, list sessions, end them, log out."""

from __future__ import annotations

from starlette.responses import Response

from tpufleet.errors import NotFound
from tpufleet.model.api_types import Acknowledgement, BrowserSession, LoginLink, WebSessionPage
from tpufleet.model.audit import AuditAction
from tpufleet.model.encoding import to_json
from tpufleet.model.users import Role
from tpufleet.service.audit import AuditSubject
from tpufleet.service.routing import ApiCall, MediaType, Router
from tpufleet.service.web import sessions

router = Router()


@router.route(
    "POST",
    "/session",
    role=Role.VIEWER,
    summary="Log a browser in: sets a cookie that stands for the token of this request",
    response=BrowserSession,
    audit=lambda call: AuditSubject(action=AuditAction.CREATE_SESSION, target=call.user.name),
)
def create_session(call: ApiCall) -> Response:
    session = sessions.create_session(
        call.store,
        call.user,
        call.now,
        browser=call.request.headers.get("user-agent") or "",
        address=call.address,
    )
    secret = call.components.deps.secret
    cookie = sessions.sign_cookie(secret, call.token_hash, session.id, call.now)
    response = _session_response(call, cookie)
    response.set_cookie(
        sessions.COOKIE,
        cookie,
        max_age=int(sessions.LIFETIME.total_seconds()),
        httponly=True,
        samesite="strict",
        secure=call.request.url.scheme == "https",
    )
    return response


@router.route(
    "GET",
    "/session",
    role=Role.VIEWER,
    summary="The session of this browser, with the token that its changes must carry",
    response=BrowserSession,
)
def get_session(call: ApiCall) -> Response:
    cookie = sessions.cookie_from(call.request.headers.get("cookie"))
    if cookie is None:
        raise NotFound("no session; log in with a token")
    return _session_response(call, cookie)


@router.route(
    "DELETE",
    "/session",
    role=Role.VIEWER,
    summary="Log this browser out",
    response=dict,
    audit=lambda call: AuditSubject(action=AuditAction.DELETE_SESSION, target=call.user.name),
)
def delete_session(call: ApiCall) -> Response:
    if call.session_id:
        sessions.end_session(call.store, call.user, call.session_id)
    response = Response(b"{}", media_type=MediaType.JSON.value)
    response.delete_cookie(sessions.COOKIE, httponly=True, samesite="strict")
    return response


@router.route(
    "GET",
    "/sessions",
    role=Role.VIEWER,
    summary="List browsers that are logged in as you; an admin sees those of all users",
    response=WebSessionPage,
)
def list_sessions(call: ApiCall) -> WebSessionPage:
    found = sessions.open_sessions(call.store, call.user, call.now)
    return WebSessionPage(sessions=tuple(found), current=call.session_id or None)


@router.route(
    "DELETE",
    "/sessions/{id}",
    role=Role.VIEWER,
    summary="Log a browser out",
    response=Acknowledgement,
    audit=lambda call: AuditSubject(
        action=AuditAction.DELETE_SESSION, target=call.path_param("id")
    ),
)
def end_session(call: ApiCall) -> Acknowledgement:
    sessions.end_session(call.store, call.user, call.path_param("id"))
    return Acknowledgement()


@router.route(
    "POST",
    "/session/link",
    role=Role.VIEWER,
    summary="A path that logs a browser in as the caller, once, within two minutes",
    response=LoginLink,
    audit=lambda call: AuditSubject(action=AuditAction.CREATE_LOGIN_LINK, target=call.user.name),
)
def create_login_link(call: ApiCall) -> LoginLink:
    code = call.components.login_links.create(call.token_hash, call.now)
    return LoginLink(path=f"/#/login/{code}")


def _session_response(call: ApiCall, cookie: str) -> Response:
    session = BrowserSession(
        user=call.user.name,
        role=call.user.role,
        csrf=sessions.csrf_token(call.components.deps.secret, cookie),
    )
    response = Response(to_json(session), media_type=MediaType.JSON.value)
    response.headers["Cache-Control"] = "no-store"
    return response
