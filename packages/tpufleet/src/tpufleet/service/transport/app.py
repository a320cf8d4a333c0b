"""The HTTP application. Without a valid token or a signed link every path answers 401, whether it
exists or not."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
import threading
import time
import urllib.parse
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tpufleet import errors
from tpufleet.clocks import Clock
from tpufleet.errors import BadInput, FleetError, Forbidden, Temporary, Unauthorized
from tpufleet.model.api_types import ERROR_HEADER, Acknowledgement, ErrorDetail, ErrorResponse
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.notifications import NotificationRules
from tpufleet.model.people.retention_rules import RetentionRules
from tpufleet.model.people.users import JOB_TOKEN_PREFIX, Role
from tpufleet.model.tpu.prices import Price, price_table
from tpufleet.model.values.encoding import to_json
from tpufleet.policy.accounting import rate_limits
from tpufleet.policy.accounting.rate_limits import ConcurrencyLimit
from tpufleet.service.api.routes import ROUTES
from tpufleet.service.files.bucket_files import ArchivedLogs
from tpufleet.service.files.file_stores import FileStores
from tpufleet.service.files.job_files import JobFiles
from tpufleet.service.files.logs import LogFiles
from tpufleet.service.files.results import ResultFiles
from tpufleet.service.files.secrets import JobSecrets
from tpufleet.service.files.shared_logs import SharedLogs
from tpufleet.service.files.snapshots import SnapshotFiles
from tpufleet.service.hosts.assignments import Assignments
from tpufleet.service.hosts.heartbeats import Heartbeats
from tpufleet.service.hosts.host_commands import HostCommandQueue
from tpufleet.service.jobs.checkpoint_leases import LocationsBusy
from tpufleet.service.jobs.queries import EndedJobRows
from tpufleet.service.jobs.submission import JobStorage
from tpufleet.service.notifications.channels import ChannelSecrets
from tpufleet.service.notifications.outbox import NotificationOutbox
from tpufleet.service.operations import housekeeping, server_status
from tpufleet.service.operations.metrics import ServerMetrics
from tpufleet.service.operations.server_status import AboutServer
from tpufleet.service.people import audit
from tpufleet.service.people.audit import AuditLog, AuditSubject
from tpufleet.service.transport import auth, signed_links, token_scopes
from tpufleet.service.transport.auth import Caller
from tpufleet.service.transport.event_streams import EventHub
from tpufleet.service.transport.limits import (
    AGENTS,
    AUTHENTICATION,
    USERS,
    RateLimiter,
    RequestSlot,
    RequestSlots,
    TooManyRequests,
    in_parts,
)
from tpufleet.service.transport.openapi import OpenApiDocument
from tpufleet.service.transport.probes import (
    NO_DATABASE,
    PROBE_PATHS,
    RETRY_AFTER_SECONDS,
    Probes,
    storage_problem,
)
from tpufleet.service.transport.routing import (
    API_PREFIX,
    NO_USER,
    SLICE_TOKEN,
    SLOW_BODY,
    ApiCall,
    Faults,
    MediaType,
    PriceTable,
    Route,
    ServerSecret,
    TokensPerUser,
    TooLarge,
    TooSlow,
)
from tpufleet.service.web import sessions
from tpufleet.service.web.pages import WebPages
from tpufleet.service.web.sessions import SAFE_METHODS, LoginLinks
from tpufleet.stores.base import Store

logger = logging.getLogger(__name__)

_STATUS: tuple[tuple[type[FleetError], int], ...] = (
    (TooManyRequests, 429),
    (TooLarge, 413),
    (TooSlow, 408),
    (errors.BadInput, 400),
    (errors.Unauthorized, 401),
    (errors.Forbidden, 403),
    (errors.NotFound, 404),
    (errors.Conflict, 409),
    (errors.Fenced, 409),
)
_is_agent_path = re.compile(
    "|".join(
        re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(API_PREFIX + route.path))
        for route in ROUTES
        if route.role == SLICE_TOKEN
    )
).fullmatch
Endpoint = Callable[[Request], Awaitable[Response]]
_FIRST = len(API_PREFIX.split("/"))  # segment after the prefix
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def create_app(
    *,
    store: Store,
    clock: Clock,
    secret: bytes,
    files: FileStores,
    storage: JobStorage,
    server: AboutServer,
    channel_secrets: ChannelSecrets,
    wake: Callable[[], None] = lambda: None,
    faults: tuple[str, ...] = (),
    tokens_per_user: int = 100,
    retention: RetentionRules | None = None,
    notifications: NotificationRules | None = None,
    prices: Mapping[tuple[str, str], Price] | None = None,
    limiter: RateLimiter | None = None,
    concurrency: ConcurrencyLimit = rate_limits.CONCURRENT_PER_USER,
) -> Starlette:
    """The application; `app.state.hub` wakes and closes its streams, `app.state.metrics` counts.
    `wake` wakes the controller. Handlers get what their parameters ask for."""
    hub = EventHub(store)
    heartbeats = Heartbeats(store, Assignments(store, files.secrets, secret), wake)
    host_commands = HostCommandQueue(store)
    rules = notifications or NotificationRules()
    outbox = NotificationOutbox(store, clock, channel_secrets, rules, lambda: hub.latest_event)
    links = LoginLinks(secret, store)
    metrics = ServerMetrics(store, clock, files.state)
    provided: Mapping[Any, object] = {
        AboutServer: server,
        ChannelSecrets: channel_secrets,
        EndedJobRows: EndedJobRows(),
        EventHub: hub,
        Faults: faults,
        Heartbeats: heartbeats,
        HostCommandQueue: host_commands,
        JobFiles: files.jobs,
        JobStorage: storage,
        LogFiles: files.logs,
        LoginLinks: links,
        NotificationOutbox: outbox,
        NotificationRules: rules,
        OpenApiDocument: OpenApiDocument(ROUTES),
        PriceTable: price_table() if prices is None else prices,
        ResultFiles: files.results,
        JobSecrets: files.secrets,
        ServerMetrics: metrics,
        ServerSecret: secret,
        SnapshotFiles: files.snapshots,
        TokensPerUser: tokens_per_user,
    }

    def notify() -> None:
        wake()
        hub.notify()

    audit_log = AuditLog(store)
    dispatch = Dispatcher(store, clock, audit_log, metrics, notify)
    threads: list[Callable[[threading.Event], None]] = [
        partial(
            housekeeping.run_until,
            store=store,
            files=files.jobs,
            rules=retention or RetentionRules(),
            clock=clock,
        ),
        outbox.run_until,
    ]
    # Those that have to finish: the server waits for them.
    awaited: list[Callable[[threading.Event], None]] = []
    if server.announced:
        awaited.append(
            partial(server_status.announce_until, store=store, name=server.name, clock=clock)
        )
    if isinstance(files.logs, ArchivedLogs):
        awaited.append(files.logs.upload_until)
    if isinstance(files.logs, SharedLogs):
        awaited.append(files.logs.compact_until)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        stopping = threading.Event()
        tasks = [
            asyncio.create_task(hub.watch()),
            asyncio.create_task(heartbeats.flush_forever()),
            asyncio.create_task(host_commands.refresh_forever(clock)),
        ]
        for run in threads:
            threading.Thread(target=run, args=(stopping,), daemon=True).start()
        ending = [asyncio.ensure_future(asyncio.to_thread(run, stopping)) for run in awaited]
        yield
        stopping.set()
        hub.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *ending, return_exceptions=True)
        await heartbeats.flush()

    app = Starlette(
        middleware=[
            Middleware(
                AuthMiddleware,
                routes=RouteTable(
                    (route, dispatch.endpoint(route.bind(provided))) for route in ROUTES
                ),
                store=store,
                clock=clock,
                secret=secret,
                limiter=limiter or RateLimiter(),
                slots=RequestSlots(concurrency),
                probes=Probes(store, clock, files.state),
                pages=WebPages(),
                links=links,
            )
        ],
        lifespan=lifespan,
    )
    app.state.hub, app.state.metrics = hub, metrics
    app.state.audit_log = audit_log
    return app


class RouteTable:
    """Calls the endpoint of a request. Starlette would compare it with one route after another."""

    def __init__(self, endpoints: Iterable[tuple[Route, Endpoint]]) -> None:
        self._methods: set[str] = set()
        # By method, number of segments and the first of them, which is never a placeholder.
        self._routes: defaultdict[tuple[str, int, str], list[tuple[list[str], Endpoint]]]
        self._routes = defaultdict(list)
        for route, endpoint in endpoints:
            segments = (API_PREFIX + route.path).split("/")
            for method in {route.method, "HEAD" if route.method == "GET" else route.method}:
                self._methods.add(method)
                self._routes[method, len(segments), segments[_FIRST]].append((segments, endpoint))
        for routes in self._routes.values():
            routes.sort(key=lambda each: sum(segment[:1] == "{" for segment in each[0]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._find(scope["method"], scope["path"])
        if found is None:
            others = (self._find(method, scope["path"]) for method in self._methods)
            response = _no_such_route(scope, 405 if any(others) else 404)
        else:
            endpoint, scope["path_params"] = found
            response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

    def _find(self, method: str, path: str) -> tuple[Endpoint, dict[str, str]] | None:
        sent = path.split("/")
        if len(sent) <= _FIRST:
            return None
        for segments, endpoint in self._routes.get((method, len(sent), sent[_FIRST]), ()):
            params = {}
            for known, given in zip(segments, sent, strict=True):
                if known[:1] == "{" and given:
                    params[known[1:-1]] = given
                elif known != given:
                    break
            else:
                return endpoint, params
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class AuthMiddleware:
    """Authenticates users before anything else happens. The routes for agents do it themselves,
    because their token depends on the slice that the request names."""

    app: ASGIApp = field(kw_only=False)  # for its lifespan: it has no routes
    routes: RouteTable
    store: Store
    clock: Clock
    secret: bytes
    limiter: RateLimiter
    slots: RequestSlots
    probes: Probes
    pages: WebPages
    links: LoginLinks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if _is_ambiguous(scope):
            message = "send one of Content-Length, Transfer-Encoding, and one Authorization header"
            response = error_response(BadInput(message))
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        if scope["path"] == "/metrics":  # where scrapers look by default
            scope = {**scope, "path": f"{API_PREFIX}/metrics"}
        if scope["path"] in PROBE_PATHS:
            await (await self.probes.respond(scope["path"]))(scope, receive, send)
            return
        if self.pages.is_public(scope["path"], scope["method"]):
            await self.pages.respond(Request(scope))(scope, receive, send)
            return
        address, token, token_hash, session, caller = _address(scope), "", "", "", None
        check_caller: Callable[[], Caller] | None = None
        limits_key = ""
        try:
            header, query = _header(scope, b"authorization"), scope["query_string"]
            signature = None if header else signed_links.signature_of(scope["method"], query)
            if signature is not None:
                token, token_hash = signature, auth.token_hash(signature)
            else:
                token, token_hash, session = await self._credentials(scope, header, address)
            self.limiter.check_address(address, token_hash)
            if signature is not None:
                check_caller = partial(self._link_caller, scope["path"], query)
                caller = await AUTHENTICATION.run(check_caller)
                limits_key = f"links:{caller.name}"
                self.limiter.check_caller(limits_key, rate_limits.PER_USER)
                self.limiter.accept(token_hash)
                scope["query_string"] = signed_links.without_signature(query)
            elif _is_agent_path(scope["path"]):
                self.limiter.check_caller(f"slice:{token_hash}", rate_limits.PER_SLICE_TOKEN)
            else:
                check_caller = partial(self._caller, token, token_hash, session)
                caller = await AUTHENTICATION.run(check_caller)
                limits_key = caller.limits_key
                self.limiter.check_caller(limits_key, rate_limits.PER_USER)
                self.limiter.accept(token_hash)
        except Exception as error:
            if isinstance(error, Unauthorized):
                self.limiter.reject(address, token_hash)
            response = _failure_response(error, "cannot authenticate the caller")
            await response(scope, receive, send)
            return
        scope["tpufleet.token"], scope["tpufleet.caller"] = token, caller
        scope["tpufleet.token_hash"] = token_hash
        scope["tpufleet.check_caller"] = check_caller or _refuse_agent
        if caller is not None:
            await self._respond(scope, receive, send, RequestSlot(self.slots, limits_key))
            return

        async def send_agent_response(message: Message) -> None:
            # The routes for agents verify the token, so the status says whether it is valid.
            if message["type"] == "http.response.start":
                if message["status"] == 401:
                    self.limiter.reject(address, token_hash)
                else:
                    self.limiter.accept(token_hash)
            await send(message)

        await self.routes(scope, receive, send_agent_response)

    async def _respond(self, scope: Scope, receive: Receive, send: Send, slot: RequestSlot) -> None:
        """Keeps the slot until the client has received the response: it is in memory as long."""
        scope["tpufleet.slot"] = slot
        try:
            await self.routes(scope, receive, in_parts(send))
        except TimeoutError:
            logger.info("the client of %s stopped receiving", scope["path"])
        finally:
            slot.close()

    async def _credentials(
        self, scope: Scope, header: str | None, address: str
    ) -> tuple[str, str, str]:
        """The token of the request, its hash, and the id of the session. Browsers send a cookie, or
        a login link, instead of a token; then only the hash is known."""
        now = self.clock.now()
        cookie = sessions.cookie_from(_header(scope, b"cookie")) if header is None else None
        if cookie is not None and not _is_agent_path(scope["path"]):
            self.limiter.check_address(address, "")
            hashed, session_id = sessions.read_cookie(self.secret, cookie, now)
            if scope["method"] not in SAFE_METHODS:
                sent = _header(scope, sessions.CSRF_HEADER.encode())
                sessions.check_csrf(self.secret, cookie, sent)
            return "", hashed, session_id
        try:
            token = auth.bearer_token(header)
        except Unauthorized:
            self.limiter.check_address(address, "")
            raise
        if token.startswith(sessions.LINK_PREFIX) and _creates_session(scope):
            self.limiter.check_address(address, "")
            return "", await AUTHENTICATION.run(self.links.redeem, token, now), ""
        return token, auth.token_hash(token), ""

    def _caller(self, token: str, token_hash: str, session: str) -> Caller:
        if token.startswith(JOB_TOKEN_PREFIX):
            return auth.authenticate_job(token, self.secret, self.store)
        now = self.clock.now()
        return auth.authenticate(token_hash, self.store, now, session)

    def _link_caller(self, path: str, query: bytes) -> Caller:
        now = self.clock.now()
        return signed_links.authenticate(path, query, self.secret, self.store, now)


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Calls the handler of a route: checks the caller's rights, reads the request, and enters into
    the audit log what belongs there."""

    store: Store
    clock: Clock
    audit_log: AuditLog
    metrics: ServerMetrics
    notify: Callable[[], None]

    def endpoint(self, route: Route) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            started = time.monotonic()
            try:
                response = await self._respond(route, request)
            except Exception as error:
                response = _failure_response(error, f"{route.method} {route.path} failed")
            passed = time.monotonic() - started
            self.metrics.count(route.operation_id, response.status_code, passed)
            return response

        endpoint.__name__ = route.operation_id
        return endpoint

    async def _respond(self, route: Route, request: Request) -> Response:
        scope = request.scope
        call = ApiCall(
            store=self.store,
            clock=self.clock,
            route=route,
            request=request,
            now=self.clock.now(),
            token=scope["tpufleet.token"],
            token_hash=scope["tpufleet.token_hash"],
            caller=scope["tpufleet.caller"],
            slot=scope.get("tpufleet.slot"),
            check_caller=scope["tpufleet.check_caller"],
            checked_at=self.clock.uptime(),
        )
        if isinstance(route.role, Role):
            await self._require_rights(call)
            call.on_slow_body = self._check_again
        call.read_query()
        if route.verify is not None:
            route.verify(call)
        if not route.stream_body:
            await call.read_body()
        if route.is_async:
            return _response(await route.handler(call))
        if call.slot is None:
            return await AGENTS.run(self._handle, call)
        since = self.clock.uptime()
        await call.slot.acquire()
        if self.clock.uptime() - since > SLOW_BODY:
            await self._check_again(call)
        response = await USERS.run(self._handle, call)
        if isinstance(response, FileResponse | StreamingResponse):
            call.slot.become_download()
        return response

    async def _check_again(self, call: ApiCall) -> None:
        """What was checked before the body, for what happened while it arrived or waited."""
        call.caller = await AUTHENTICATION.run(call.check_caller)
        call.now = self.clock.now()
        await self._require_rights(call)

    async def _require_rights(self, call: ApiCall) -> None:
        """Raises Forbidden, and enters that into the audit log."""
        route = call.route
        assert isinstance(route.role, Role)
        try:
            call.user.require_role(route.role)
            token_scopes.require(call.user, route.method, route.operation_id)
        except Forbidden as error:
            subject = await _refused_subject(call)
            if subject is not None:
                await USERS.run(self._record_refusal, call, subject, error)
            raise

    def _handle(self, call: ApiCall) -> Response:
        if call.caller is None:  # an agent
            return _response(call.route.handler(call))
        if call.route.audit is not None:
            answer = self._handle_audited(call, call.route.audit(call))
        else:
            answer = self._handle_by_owner(call, call.caller)
        if call.route.method not in SAFE_METHODS:
            self.notify()
        return _response(answer)

    def _handle_audited(self, call: ApiCall, subject: AuditSubject) -> object:
        requested = audit.entry(subject, call.user, call.address, call.now)
        self.audit_log.check_limit(call.user.name)
        self.audit_log.record(requested)
        try:
            return call.route.handler(call)
        except FleetError as error:
            self.audit_log.record_refusal(requested, error)
            raise

    def _handle_by_owner(self, call: ApiCall, caller: Caller) -> object:
        """Records what an admin does to what belongs to others, and what is forbidden."""
        subject = _foreign_subject(call)
        if subject is None:
            return call.route.handler(call)

        def record(owner: str, what: str) -> None:
            foreign = replace(subject, target=what, detail=f"of {owner}")
            self.audit_log.record(audit.entry(foreign, call.user, call.address, call.now))

        call.caller = replace(caller, on_foreign_access=record)
        try:
            return call.route.handler(call)
        except Forbidden as error:
            self._record_refusal(call, subject, error)
            raise

    def _record_refusal(self, call: ApiCall, subject: AuditSubject, error: FleetError) -> None:
        self.audit_log.check_limit(call.user.name)
        refused = audit.entry(subject, call.user, call.address, call.now)
        self.audit_log.record_refusal(refused, error)


async def _refused_subject(call: ApiCall) -> AuditSubject | None:
    """What a request asks for that was refused before it was read, or after a slow body."""
    route = call.route
    if (route.audit is not None or route.foreign_target is not None) and not route.stream_body:
        try:
            call.read_query()
            await call.read_body()
            if route.audit is not None:
                return await USERS.run(route.audit, call)
        except FleetError as error:
            logger.debug("%s is refused and cannot be read: %s", route.operation_id, error)
    return _foreign_subject(call)


def _foreign_subject(call: ApiCall) -> AuditSubject | None:
    """None: the route only reads, and needs no entry."""
    route = call.route
    target = _foreign_target(call)
    if route.foreign is not None:
        return AuditSubject(action=route.foreign, target=target)
    if route.method in SAFE_METHODS:
        return None
    return AuditSubject(action=AuditAction.REQUEST, target=f"{route.method} {route.path} {target}")


def _foreign_target(call: ApiCall) -> str:
    in_path = next(iter(call.request.path_params.values()), "")
    if in_path or call.route.foreign_target is None:
        return in_path or call.query.get("user", "")
    try:
        return call.route.foreign_target(call)
    except BadInput:  # answered by the handler, or refused before it is read
        return ""


def _response(answer: object) -> Response:
    if isinstance(answer, Response):
        return answer
    content = to_json(Acknowledgement() if answer is None else answer)
    return Response(content, media_type=MediaType.JSON.value)


def error_response(error: FleetError) -> Response:
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), None)
    if status is None:
        status = 503 if isinstance(error, Temporary) else 400
    if status == 503:
        # It may name hosts, files and users of the database, whose store logs its outages.
        level = logging.DEBUG if isinstance(error, errors.DatabaseUnreachable) else logging.WARNING
        logger.log(level, "answered 503: %s", error)
        response = _error(503, "Unreachable", _unavailable(error))
        response.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
        return response
    if isinstance(error, errors.ProviderError):
        logger.warning("answered %s: %s", status, error)  # `tpu status` shows it to admins
    # Subclasses are reported as the class in `errors` that every client knows.
    kind = next(each.__name__ for each in type(error).__mro__ if each.__module__ == errors.__name__)
    response = _error(status, kind, str(error))
    if isinstance(error, TooManyRequests):
        response.headers["Retry-After"] = str(error.retry_after_seconds)
    if isinstance(error, TooManyRequests | TooSlow):
        response.headers["Connection"] = "close"
    return response


def _unavailable(error: FleetError) -> str:
    if isinstance(error, LocationsBusy):
        return str(error)
    if isinstance(error, errors.ProviderError):  # of the bucket
        return f"{error}; retry"
    if isinstance(error, errors.DatabaseUnreachable):
        return f"{NO_DATABASE}; retry"
    return storage_problem(error) or "the server is temporarily unavailable; retry"


def _failure_response(error: Exception, what: str) -> Response:
    if isinstance(error, FleetError):
        return error_response(error)
    if isinstance(error, OSError) and error.errno in _DISK_FULL_ERRORS:
        return error_response(errors.StorageFull(str(error)))
    logger.error(what, exc_info=error)
    return _error(500, "FleetError", "internal server error; see the server log")


def _error(status: int, kind: str, message: str) -> Response:
    body = to_json(ErrorResponse(error=ErrorDetail(kind=kind, message=message)))
    short = to_json(ErrorResponse(error=ErrorDetail(kind=kind, message=message[:1000])))
    headers = {ERROR_HEADER: urllib.parse.quote(short)}
    if status == 401:
        headers |= {"WWW-Authenticate": "Bearer", "Connection": "close"}
    return Response(body, status_code=status, headers=headers, media_type=MediaType.JSON.value)


def _no_such_route(scope: Scope, status: int) -> Response:
    """Reached by authenticated users, and by agents that use the wrong method."""
    if scope.get("tpufleet.caller") is None:
        return error_response(Unauthorized(NO_USER))
    path = urllib.parse.quote(scope["path"])
    message = f"no route {scope['method']} {path}; see {API_PREFIX}/openapi.json"
    return _error(status, "NotFound", message)


def _refuse_agent() -> Caller:
    raise Unauthorized(NO_USER)


def _creates_session(scope: Scope) -> bool:
    return scope["method"] == "POST" and scope["path"] == f"{API_PREFIX}/session"


def _address(scope: Scope) -> str:
    """The client's IPv4 address, or its IPv6 network: one client often has all of that."""
    host: str = scope["client"][0] if scope.get("client") else ""
    return ":".join(host.split(":")[:4]) if ":" in host else host


def _is_ambiguous(scope: Scope) -> bool:
    """A proxy before us may take another length, or another token, than we do: what it passes on as
    the body of one request would be the next one here."""
    names = [name for name, _ in scope["headers"]]
    both = b"content-length" in names and b"transfer-encoding" in names
    return both or names.count(b"authorization") > 1


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)
