"""The HTTP application. Without a valid token or a signed link every path answers 401, whether it
exists or not."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import re
import threading
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tpufleet import errors
from tpufleet.errors import BadInput, FleetError, Forbidden, Temporary, Unauthorized
from tpufleet.model.api_types import ERROR_HEADER, ErrorDetail, ErrorResponse
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.users import JOB_TOKEN_PREFIX, Role
from tpufleet.model.values.encoding import to_json
from tpufleet.policy.accounting import rate_limits
from tpufleet.policy.accounting.rate_limits import ConcurrencyLimit
from tpufleet.service.api.routes import ROUTES
from tpufleet.service.files.archived import ArchivedLogs, ArchivedResults, ArchivedSnapshots
from tpufleet.service.files.logs import LogFiles
from tpufleet.service.files.results import ResultFiles
from tpufleet.service.files.secrets import SecretFiles, SharedSecrets, derived_key
from tpufleet.service.files.shared_logs import SharedLogs
from tpufleet.service.files.snapshots import SnapshotFiles
from tpufleet.service.hosts.assignments import Assignments
from tpufleet.service.hosts.fast_heartbeats import FastHeartbeats
from tpufleet.service.hosts.heartbeats import Heartbeats
from tpufleet.service.hosts.host_commands import HostCommandQueue
from tpufleet.service.jobs.checkpoint_leases import LocationsBusy
from tpufleet.service.jobs.queries import EndedJobRows
from tpufleet.service.jobs.submission import JobStorage
from tpufleet.service.notifications.channels import ChannelSecrets
from tpufleet.service.notifications.outbox import NotificationOutbox
from tpufleet.service.operations import housekeeping, server_presence
from tpufleet.service.operations.metrics import ServerMetrics
from tpufleet.service.people import audit
from tpufleet.service.people.audit import AuditLog, AuditSubject
from tpufleet.service.transport import auth, openapi, probes, signed_links, token_scopes
from tpufleet.service.transport.auth import Caller
from tpufleet.service.transport.connection_limits import AUTHENTICATED, RESPONSE_RECEIVED
from tpufleet.service.transport.event_streams import EventHub
from tpufleet.service.transport.rate_limiter import RateLimiter, TooManyRequests
from tpufleet.service.transport.request_slots import RequestSlot, RequestSlots
from tpufleet.service.transport.routing import (
    API_PREFIX,
    SLICE_TOKEN,
    SLOW_BODY,
    ApiCall,
    MediaType,
    Route,
    ServiceComponents,
    ServiceDependencies,
    TooLarge,
)
from tpufleet.service.transport.worker_threads import AGENTS, AUTHENTICATION, USERS
from tpufleet.service.web import sessions
from tpufleet.service.web.pages import WebPages
from tpufleet.service.web.sessions import LoginLinks

logger = logging.getLogger(__name__)

_STATUS: tuple[tuple[type[FleetError], int], ...] = (
    (TooManyRequests, 429),
    (TooLarge, 413),
    (errors.BadInput, 400),
    (errors.Unauthorized, 401),
    (errors.Forbidden, 403),
    (errors.NotFound, 404),
    (errors.Conflict, 409),
    (errors.Fenced, 409),
)
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNAVAILABLE = "the server is temporarily unavailable; retry"
NO_DATABASE = f"{probes.NO_DATABASE}; retry"
DISK_FULL = (
    "the server's disk is full, so the request was not accepted\n"
    "  next: free space on that disk, then retry; `tpu status` shows the server's errors"
)
DATABASE_FULL = (
    "the disk of the server's database is full, so the request was not accepted\n"
    "  next: free space on the disk of the database server, or make it larger, then retry; "
    "`tpu status` shows the server's errors"
)
READ_ONLY = (
    "the server's database is read-only, so the request was not accepted\n"
    "  next: make its file and the file system writable again, then retry; `tpu status` shows the "
    "server's errors"
)
UNUSABLE = (
    "the server cannot write its database, so the request was not accepted\n"
    "  next: an admin finds the reason with `tpu status`, or in the server's log"
)
_STORAGE = (
    (errors.DatabaseUnreachable, NO_DATABASE),
    (errors.DatabaseFull, DATABASE_FULL),
    (errors.StorageFull, DISK_FULL),
    (errors.StorageReadOnly, READ_ONLY),
    (errors.StorageUnusable, UNUSABLE),
)


def create_app(
    deps: ServiceDependencies,
    limiter: RateLimiter | None = None,
    concurrency: ConcurrencyLimit = rate_limits.CONCURRENT_PER_USER,
) -> Starlette:
    """The application; `app.state.hub` wakes and closes its streams, and
    `app.state.heartbeat_endpoint` answers heartbeats without its middleware and routes."""
    components = _components(deps)
    limiter = limiter or RateLimiter()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(components.hub.watch()),
            asyncio.create_task(components.heartbeats.flush_forever()),
            asyncio.create_task(components.host_commands.refresh_forever(deps.clock)),
        ]
        stopping = threading.Event()
        housekeeping_thread = threading.Thread(
            target=housekeeping.run_until,
            args=(stopping, deps.store, components.job_files, deps.retention, deps.clock),
            name="housekeeping",
            daemon=True,
        )
        housekeeping_thread.start()
        threading.Thread(
            target=components.outbox.run_until, args=(stopping,), name="notifications", daemon=True
        ).start()
        uploads: list[asyncio.Future[None]] = []
        if deps.announced:
            presence = asyncio.to_thread(
                server_presence.announce_until, stopping, deps.store, deps.server_name, deps.clock
            )
            uploads.append(asyncio.ensure_future(presence))
        if isinstance(components.logs, ArchivedLogs):
            upload = asyncio.to_thread(components.logs.upload_until, stopping)
            uploads.append(asyncio.ensure_future(upload))
        if isinstance(components.logs, SharedLogs):
            compaction = asyncio.to_thread(components.logs.compact_until, stopping)
            uploads.append(asyncio.ensure_future(compaction))
        yield
        stopping.set()
        components.hub.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *uploads, return_exceptions=True)
        await components.heartbeats.flush()

    app = Starlette(
        routes=[
            StarletteRoute(
                API_PREFIX + route.path, _endpoint(components, route), methods=[route.method]
            )
            for route in ROUTES
        ],
        middleware=[
            Middleware(
                AuthMiddleware,
                deps=deps,
                limiter=limiter,
                slots=RequestSlots(concurrency),
                pages=WebPages(),
                links=components.login_links,
            )
        ],
        exception_handlers={HTTPException: _no_such_route},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.hub = components.hub
    app.state.audit_log = components.audit_log
    app.state.heartbeat_endpoint = FastHeartbeats(components, limiter, _failure_response)
    return app


class AuthMiddleware:
    """Authenticates users before anything else happens. The routes for agents do it themselves,
    because their token depends on the slice that the request names."""

    def __init__(
        self,
        app: ASGIApp,
        deps: ServiceDependencies,
        limiter: RateLimiter,
        slots: RequestSlots,
        pages: WebPages,
        links: LoginLinks,
    ) -> None:
        self._app = app
        self._deps = deps
        self._limiter = limiter
        self._slots = slots
        self._probes = probes.Probes(deps.store, deps.clock, deps.state)
        self._pages = pages
        self._links = links
        agents = "|".join(
            re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(API_PREFIX + route.path))
            for route in ROUTES
            if route.role == SLICE_TOKEN
        )
        self._is_agent_path = re.compile(agents).fullmatch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _is_ambiguous(scope):
            await _ambiguous_request()(scope, receive, send)
            return
        if scope["path"] == "/metrics":  # where scrapers look by default
            scope = {**scope, "path": f"{API_PREFIX}/metrics"}
        if scope["path"] in probes.PATHS:
            await (await self._probes.respond(scope["path"]))(scope, receive, send)
            return
        if self._pages.is_public(scope["path"], scope["method"]):
            await self._pages.respond(Request(scope))(scope, receive, send)
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
            self._limiter.check_address(address, token_hash)
            if signature is not None:
                check_caller = partial(self._link_caller, scope["path"], query)
                caller = await AUTHENTICATION.run(check_caller)
                limits_key = f"links:{caller.name}"
                self._limiter.check_caller(limits_key, rate_limits.PER_USER)
                self._accept(scope, token_hash)
                scope["query_string"] = signed_links.without_signature(query)
            elif self._is_agent_path(scope["path"]):
                self._limiter.check_caller(f"slice:{token_hash}", rate_limits.PER_SLICE_TOKEN)
            else:
                check_caller = partial(self._caller, token, token_hash, session)
                caller = await AUTHENTICATION.run(check_caller)
                limits_key = caller.limits_key
                self._limiter.check_caller(limits_key, rate_limits.PER_USER)
                self._accept(scope, token_hash)
        except FleetError as error:
            if isinstance(error, Unauthorized):
                self._limiter.reject(address, token_hash)
            await error_response(error)(scope, receive, send)
            return
        except Exception:
            logger.exception("cannot authenticate the caller of %s", scope["path"])
            await _internal_error()(scope, receive, send)
            return
        scope["tpufleet.token"], scope["tpufleet.caller"] = token, caller
        scope["tpufleet.token_hash"] = token_hash
        scope["tpufleet.check_caller"] = check_caller or _refuse_agent
        if caller is not None:
            await self._respond(scope, receive, send, RequestSlot(self._slots, limits_key))
            return

        async def send_agent_response(message: Message) -> None:
            # The routes for agents verify the token, so the status says whether it is valid.
            if message["type"] == "http.response.start":
                if message["status"] == 401:
                    self._limiter.reject(address, token_hash)
                else:
                    self._accept(scope, token_hash)
            await send(message)

        await self._app(scope, receive, send_agent_response)

    async def _respond(self, scope: Scope, receive: Receive, send: Send, slot: RequestSlot) -> None:
        """Keeps the slot until the client has received the response: it is in memory as long."""
        scope["tpufleet.slot"] = slot
        try:
            await self._app(scope, receive, send)
            if slot.held and RESPONSE_RECEIVED in scope:
                await scope[RESPONSE_RECEIVED]()
        finally:
            slot.close()

    async def _credentials(
        self, scope: Scope, header: str | None, address: str
    ) -> tuple[str, str, str]:
        """The token of the request, its hash, and the id of the session. Browsers send a cookie, or
        a login link, instead of a token; then only the hash is known."""
        now = self._deps.clock.now()
        cookie = sessions.cookie_from(_header(scope, b"cookie")) if header is None else None
        if cookie is not None and not self._is_agent_path(scope["path"]):
            self._limiter.check_address(address, "")
            hashed, session_id = sessions.read_cookie(self._deps.secret, cookie, now)
            if scope["method"] not in sessions.SAFE_METHODS:
                sent = _header(scope, sessions.CSRF_HEADER.encode())
                sessions.check_csrf(self._deps.secret, cookie, sent)
            return "", hashed, session_id
        try:
            token = auth.bearer_token(header)
        except Unauthorized:
            self._limiter.check_address(address, "")
            raise
        if token.startswith(sessions.LINK_PREFIX) and _creates_session(scope):
            self._limiter.check_address(address, "")
            return "", await AUTHENTICATION.run(self._links.redeem, token, now), ""
        return token, auth.token_hash(token), ""

    def _caller(self, token: str, token_hash: str, session: str) -> Caller:
        if token.startswith(JOB_TOKEN_PREFIX):
            return auth.authenticate_job(token, self._deps.secret, self._deps.store)
        now = self._deps.clock.now()
        return auth.authenticate(token_hash, self._deps.store, now, session)

    def _link_caller(self, path: str, query: bytes) -> Caller:
        deps = self._deps
        return signed_links.authenticate(path, query, deps.secret, deps.store, deps.clock.now())

    def _accept(self, scope: Scope, token_hash: str) -> None:
        scope[AUTHENTICATED] = True
        self._limiter.accept(token_hash)


def _endpoint(
    components: ServiceComponents, route: Route
) -> Callable[[Request], Awaitable[Response]]:

    async def endpoint(request: Request) -> Response:
        started = time.monotonic()
        response = await respond(request)
        components.metrics.count(
            route.operation_id, response.status_code, time.monotonic() - started
        )
        return response

    async def respond(request: Request) -> Response:
        try:
            call = ApiCall(
                components=components,
                route=route,
                request=request,
                now=components.deps.clock.now(),
                token=request.scope["tpufleet.token"],
                token_hash=request.scope["tpufleet.token_hash"],
                caller=request.scope["tpufleet.caller"],
                slot=request.scope.get("tpufleet.slot"),
                check_caller=request.scope["tpufleet.check_caller"],
                checked_at=components.deps.clock.uptime(),
            )
            if isinstance(route.role, Role):
                await _require_rights(call)
                call.on_slow_body = _check_again
            call.read_query()
            if not route.stream_body:
                await call.read_body()
            if route.is_async:
                return _response(await route.handler(call))
            if call.slot is None:
                return await AGENTS.run(_respond, call)
            await _take_slot(call, call.slot)
            response = await USERS.run(_respond, call)
            if isinstance(response, FileResponse | StreamingResponse):
                call.slot.become_download()
            return response
        except FleetError as error:
            return error_response(error)
        except OSError as error:
            if error.errno in _DISK_FULL_ERRORS:
                return error_response(errors.StorageFull(str(error)))
            logger.exception("%s %s failed", route.method, route.path)
            return _internal_error()
        except Exception:
            logger.exception("%s %s failed", route.method, route.path)
            return _internal_error()

    endpoint.__name__ = route.operation_id
    return endpoint


def _respond(call: ApiCall) -> Response:
    return _response(_handle(call))


async def _take_slot(call: ApiCall, slot: RequestSlot) -> None:
    clock = call.components.deps.clock
    since = clock.uptime()
    await slot.acquire()
    if clock.uptime() - since > SLOW_BODY:
        await _check_again(call)


async def _check_again(call: ApiCall) -> None:
    """What was checked before the body, for what happened while it arrived or waited."""
    call.caller = await AUTHENTICATION.run(call.check_caller)
    call.now = call.components.deps.clock.now()
    await _require_rights(call)


async def _require_rights(call: ApiCall) -> None:
    """Raises Forbidden, and enters that into the audit log."""
    route = call.route
    assert isinstance(route.role, Role)
    try:
        call.user.require_role(route.role)
        token_scopes.require(call.user, route.method, route.operation_id)
    except Forbidden as error:
        subject = await _refused_subject(call)
        if subject is not None:
            refused = audit.entry(subject, call.user, call.address, call.now)
            log = call.components.audit_log
            log.check_limit(call.user.name)
            await USERS.run(log.record_refusal, refused, error)
        raise


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
            logger.info("%s is refused and cannot be read: %s", route.operation_id, error)
    return _foreign_subject(call)


def _foreign_subject(call: ApiCall) -> AuditSubject | None:
    """None: the route only reads, and needs no entry."""
    route = call.route
    target = _foreign_target(call)
    if route.foreign_action is not None:
        return AuditSubject(action=route.foreign_action, target=target)
    if route.method in ("GET", "HEAD"):
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


def _handle(call: ApiCall) -> object:
    route = call.route
    if route.audit is None:
        return _handle_by_owner(call)
    log = call.components.audit_log
    requested = audit.entry(route.audit(call), call.user, call.address, call.now)
    log.check_limit(call.user.name)
    log.record(requested)
    try:
        return route.handler(call)
    except FleetError as error:
        log.record_refusal(requested, error)
        raise


def _handle_by_owner(call: ApiCall) -> object:
    """Enters what an admin does to what belongs to others, and what is forbidden."""
    if call.caller is None:  # an agent
        return call.route.handler(call)
    subject = _foreign_subject(call)

    def enter(owner: str, what: str) -> None:
        if subject is not None:
            foreign = replace(subject, target=what, detail=f"of {owner}")
            call.components.audit_log.record(
                audit.entry(foreign, call.user, call.address, call.now)
            )

    call.caller = replace(call.caller, on_foreign_access=enter)
    try:
        return call.route.handler(call)
    except Forbidden as error:
        if subject is not None:
            refused = audit.entry(subject, call.user, call.address, call.now)
            call.components.audit_log.check_limit(call.user.name)
            call.components.audit_log.record_refusal(refused, error)
        raise


def _response(answer: object) -> Response:
    if isinstance(answer, Response):
        return answer
    return Response(to_json(answer), media_type=MediaType.JSON.value)


def error_response(error: FleetError) -> Response:
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), None)
    if status is None:
        status = 503 if isinstance(error, Temporary) else 400
    if status == 503:
        # It may name hosts, files and users of the database, whose store logs its outages.
        level = logging.DEBUG if isinstance(error, errors.DatabaseUnreachable) else logging.WARNING
        logger.log(level, "answered 503: %s", error)
        message = next((text for kind, text in _STORAGE if isinstance(error, kind)), UNAVAILABLE)
        if isinstance(error, errors.ProviderError):  # of the bucket
            message = f"{error}; retry"
        elif isinstance(error, LocationsBusy):
            message = str(error)
        response = _error(503, "Unreachable", message)
        response.headers["Retry-After"] = str(probes.RETRY_AFTER_SECONDS)
        return response
    if isinstance(error, errors.ProviderError):
        logger.warning("answered %s: %s", status, error)  # `tpu status` shows it to admins
    # Subclasses are reported as the class in `errors` that every client knows.
    kind = next(each.__name__ for each in type(error).__mro__ if each.__module__ == errors.__name__)
    response = _error(status, kind, str(error))
    if isinstance(error, TooManyRequests):
        response.headers["Retry-After"] = str(error.retry_after_seconds)
        response.headers["Connection"] = "close"
    return response


def _failure_response(error: Exception) -> Response:
    return error_response(error) if isinstance(error, FleetError) else _internal_error()


def _internal_error() -> Response:
    return _error(500, "FleetError", "internal server error; see the server log")


def _error(status: int, kind: str, message: str) -> Response:
    body = to_json(ErrorResponse(error=ErrorDetail(kind=kind, message=message)))
    short = to_json(ErrorResponse(error=ErrorDetail(kind=kind, message=message[:1000])))
    headers = {ERROR_HEADER: urllib.parse.quote(short)}
    if status == 401:
        headers |= {"WWW-Authenticate": "Bearer", "Connection": "close"}
    return Response(body, status_code=status, headers=headers, media_type=MediaType.JSON.value)


def _no_such_route(request: Request, error: Exception) -> Response:
    """Reached by authenticated users, and by agents that use the wrong method."""
    assert isinstance(error, HTTPException)
    if request.scope.get("tpufleet.caller") is None:
        return error_response(Unauthorized("no such route for agents"))
    message = f"no route {request.method} {request.url.path}; see {API_PREFIX}/openapi.json"
    return _error(error.status_code, "NotFound", message)


def _refuse_agent() -> Caller:
    raise Unauthorized("requires a user token")


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


def _ambiguous_request() -> Response:
    message = "send either Content-Length or Transfer-Encoding, and one Authorization header"
    response = error_response(errors.BadInput(message))
    response.headers["Connection"] = "close"
    return response


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


@functools.cache
def _openapi_document() -> bytes:
    """Made when it is first asked for: that takes a tenth of a second."""
    return openapi.document(ROUTES)


def _components(deps: ServiceDependencies) -> ServiceComponents:
    secrets = _secrets(deps)
    hub = EventHub(deps.store)
    channel_secrets = ChannelSecrets(_secret_keys(deps))
    return ServiceComponents(
        deps=deps,
        storage=JobStorage(
            snapshots=_snapshots(deps),
            secrets=secrets,
            checkpoints=deps.checkpoints or str(deps.state / "checkpoints"),
            state=str(deps.state),
            providers=deps.providers,
            default_provider=deps.default_provider,
            local_containers=deps.local_containers,
            tpu_vm_containers=deps.tpu_vm_containers,
            local_hosts=deps.local_hosts,
        ),
        logs=_logs(deps),
        results=_results(deps),
        heartbeats=Heartbeats(deps.store, Assignments(deps.store, secrets, deps.secret), deps.wake),
        hub=hub,
        ended_job_rows=EndedJobRows(),
        host_commands=HostCommandQueue(deps.store),
        metrics=ServerMetrics(deps.store, deps.clock, deps.state),
        login_links=LoginLinks(deps.secret, deps.store),
        channel_secrets=channel_secrets,
        outbox=NotificationOutbox(
            deps.store, deps.clock, channel_secrets, deps.notifications, lambda: hub.latest_event
        ),
        audit_log=AuditLog(deps.store),
        openapi=_openapi_document,
    )


def _snapshots(deps: ServiceDependencies) -> SnapshotFiles:
    folder = deps.state / "snapshots"
    if deps.archive is None:
        return SnapshotFiles(folder, deps.snapshot_limit)
    return ArchivedSnapshots(folder, deps.snapshot_limit, deps.archive)


def _results(deps: ServiceDependencies) -> ResultFiles:
    folder = deps.state / "results"
    return ResultFiles(folder) if deps.archive is None else ArchivedResults(folder, deps.archive)


def _secret_keys(deps: ServiceDependencies) -> list[bytes]:
    return [key for key in (deps.secrets_key, derived_key(deps.secret)) if key is not None]


def _secrets(deps: ServiceDependencies) -> SecretFiles:
    keys = _secret_keys(deps)
    files = SecretFiles(deps.state / "secrets", keys)
    if not deps.shared:
        if count := files.encrypt_all():
            logger.info("encrypted %s secrets", count)
        return files
    secrets = SharedSecrets(deps.store, keys, deps.clock)
    if count := secrets.import_files(files):
        logger.info("copied %s secrets from this disk to the database", count)
    return secrets


def _logs(deps: ServiceDependencies) -> LogFiles:
    folder = deps.state / "logs"
    if deps.archive is None:
        return LogFiles(folder, deps.log_limit)
    if deps.shared:
        return SharedLogs(
            deps.store,
            deps.archive,
            deps.clock,
            deps.log_limit,
            earlier=ArchivedLogs(folder, deps.archive),
        )
    return ArchivedLogs(folder, deps.archive, deps.log_limit)
