"""Routes: what each one accepts, who may call it, and what its handler gets."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, NewType, TypeVar, TypeVarTuple, get_type_hints

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tpufleet.clocks import Clock
from tpufleet.errors import BadInput, Unauthorized, must_be, unknown
from tpufleet.model.api_types import Acknowledgement
from tpufleet.model.job.jobs import Job, JobId
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.users import Role, TokenScope
from tpufleet.model.tpu.prices import Price
from tpufleet.model.values.bounds import check_bounds
from tpufleet.model.values.encoding import from_json
from tpufleet.service.jobs import queries
from tpufleet.service.jobs.commands import CommandContext
from tpufleet.service.people.audit import AuditSubject
from tpufleet.service.transport import token_scopes
from tpufleet.service.transport.auth import Caller
from tpufleet.service.transport.limits import USERS, RequestSlot
from tpufleet.stores.base import Store

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
Handler = TypeVar("Handler", bound=Callable[..., Any])
API_PREFIX = "/api/v1"
SLICE_TOKEN = "slice"  # instead of a role: called by agents, with the token of their slice
DEFAULT_BODY_LIMIT = 256 * 1024
# Longer than a body takes that is sent at once. The client decides how long it takes, so what was
# checked before a slow one is checked again.
SLOW_BODY = timedelta(seconds=1)
# A body may take this long, and longer at this average rate.
BODY_GRACE_SECONDS, BODY_BYTES_PER_SECOND = 30.0, 4 * 1024
NO_USER = "requires a user token"
_MAX_DIGITS = 20  # of a number in a parameter or header; Python rejects very long ones


# Values that handlers ask for by these types, beside the classes of the service.
ServerSecret = NewType("ServerSecret", bytes)  # the tokens of slices and attempts derive from it
PriceTable = NewType("PriceTable", Mapping[tuple[str, str], Price])
TokensPerUser = NewType("TokensPerUser", int)
Faults = NewType("Faults", tuple[str, ...])  # that can be injected


class MediaType(StrEnum):
    """Of a response."""

    JSON = "application/json"
    TEXT = "text/plain; charset=utf-8"
    METRICS = "text/plain; version=0.0.4; charset=utf-8"
    EVENTS = "text/event-stream"
    ARCHIVE = "application/gzip"
    BYTES = "application/octet-stream"


class TooLarge(BadInput):
    """The request body exceeds the limit of the route."""


class TooSlow(BadInput):
    """The request body arrives more slowly than any working connection."""


@dataclass(frozen=True, slots=True)
class Param:
    """A query parameter."""

    name: str
    description: str
    number: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    method: str
    path: str  # below the prefix
    role: Role | str
    # Of the call, and of what its other parameters ask for by type; `body` is the decoded body, and
    # `job` the job that the path names.
    handler: Callable[..., Any]
    params: tuple[Param, ...] = ()
    body: Any = None  # type of the JSON body, by default that of the parameter; bytes for a raw one
    response: Any = None  # by default what the handler returns
    media_type: MediaType = MediaType.JSON
    limit: int = DEFAULT_BODY_LIMIT  # bytes of the body
    stream_body: bool = False  # the handler reads the body itself
    verify: Callable[..., None] | None = None  # called before the body is read
    audit: Callable[..., AuditSubject] | None = None  # what it enters into the audit log
    # Entered only when it concerns what belongs to another user, or is refused.
    foreign: AuditAction | None = None
    # What a refused request asked for, where the body and not the path names it.
    foreign_target: Callable[[ApiCall], str] | None = None

    @property
    def is_async(self) -> bool:
        """Runs in the event loop, so it must not block; other handlers run in a worker thread."""
        return inspect.iscoroutinefunction(self.handler)

    @property
    def operation_id(self) -> str:
        return self.handler.__name__

    @property
    def summary(self) -> str:
        """The first paragraph of the handler's docstring."""
        paragraph = (inspect.getdoc(self.handler) or "").partition("\n\n")[0]
        return " ".join(paragraph.split()).removesuffix(".")

    def bind(self, provided: Mapping[Any, object]) -> Route:
        """The same route with functions of the call alone."""
        functions = {"handler": self.handler, "audit": self.audit, "verify": self.verify}
        bound = {name: _bind(each, provided) for name, each in functions.items() if each}
        return replace(self, **bound)  # type: ignore[arg-type]


@functools.cache  # evaluating annotations takes most of the time in which an application is made
def _wanted(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The types of its parameters after the call."""
    _, *names = inspect.signature(function).parameters
    hints = get_type_hints(function) if names else {}
    return {name: hints[name] for name in names}


def _bind(function: Callable[..., Any], provided: Mapping[Any, object]) -> Callable[..., Any]:
    wanted = _wanted(function)
    if not wanted:
        return function
    fixed = {name: provided[wanted[name]] for name in wanted if name not in ("body", "job")}
    bound = functools.partial(function, **fixed)
    if len(fixed) == len(wanted):
        return functools.update_wrapper(bound, function)

    def with_request(call: ApiCall) -> Any:
        found = {"job": call.path_job} if "job" in wanted else {}
        decoded = {"body": call.parse_body(wanted["body"])} if "body" in wanted else {}
        return bound(call, **found, **decoded)

    return functools.update_wrapper(with_request, function)


class Router:
    """Collects the routes of one module."""

    def __init__(self) -> None:
        self.routes: list[Route] = []

    def route(
        self,
        method: str,
        path: str,
        role: Role | str,
        *,
        audit: AuditAction | Callable[..., AuditSubject] | None = None,
        detail: Callable[[ApiCall], str] = lambda _: "",
        **options: Any,
    ) -> Callable[[Handler], Handler]:
        """Register the decorated handler. `options` are the other fields of `Route`. With an
        action, the target of the entry in the audit log is what the path names, else the caller."""

        def subject(call: ApiCall) -> AuditSubject:
            assert isinstance(audit, AuditAction)
            target = call.path_param(name) if (name := first_placeholder(path)) else call.user.name
            return AuditSubject(action=audit, target=target, detail=detail(call))

        def register(handler: Handler) -> Handler:
            hints = get_type_hints(handler)
            answer = hints["return"]
            inferred = {
                "body": hints.get("body"),
                "response": Acknowledgement if answer is type(None) else answer,
                "audit": subject if isinstance(audit, AuditAction) else audit,
            }
            if answer in (Response, object):
                del inferred["response"]
            fields = {**inferred, **options}
            self.routes.append(
                Route(method=method, path=path, role=role, handler=handler, **fields)
            )
            return handler

        return register

    get = functools.partialmethod(route, "GET")
    post = functools.partialmethod(route, "POST")
    put = functools.partialmethod(route, "PUT")
    patch = functools.partialmethod(route, "PATCH")
    delete = functools.partialmethod(route, "DELETE")


def first_placeholder(path: str) -> str | None:
    match = re.search(r"\{(\w+)\}", path)
    return match[1] if match else None


@dataclass(kw_only=True, slots=True)
class ApiCall:
    """One request, as a handler sees it."""

    store: Store
    clock: Clock
    route: Route
    request: Request
    now: datetime
    token: str
    token_hash: str = ""
    caller: Caller | None = None  # None on the routes for agents
    slot: RequestSlot | None = None  # among the requests of the caller; None for agents
    # Authenticates the caller again. Raises Unauthorized when the token was revoked or has expired,
    # or its user was deleted.
    check_caller: Callable[[], Caller]
    checked_at: timedelta  # uptime: when the caller was authenticated
    # Called at the end of a slow body, before the handler acts on it.
    on_slow_body: Callable[[ApiCall], Awaitable[None]] | None = None
    body: bytes = b""
    body_complete: bool = False
    query: dict[str, str] = field(default_factory=dict)

    @property
    def user(self) -> Caller:
        if self.caller is None:
            raise Unauthorized(NO_USER)
        return self.caller

    @property
    def address(self) -> str:
        """From which the request came."""
        return self.request.client.host if self.request.client is not None else ""

    @property
    def context(self) -> CommandContext:
        return CommandContext(store=self.store, caller=self.user, now=self.now)

    def find_job(self, ref: str) -> Job:
        """The job that a path or a parameter refers to."""
        if self.user.job_id is not None:
            return self._own_job(self.user.job_id, ref)
        own = self.user.name if self.user.scope is TokenScope.SUBMIT else None
        job = queries.find_job(self.store, ref, self.user.name, owner=own)
        token_scopes.require_job(self.user, job)
        return job

    @property
    def path_job(self) -> Job:
        return self.find_job(self.path_param("ref"))

    def _own_job(self, job_id: JobId, ref: str) -> Job:
        """Of a caller that is limited to one job: no answer depends on other jobs."""
        job = self.store.job(job_id)
        if job is None or ref not in (job.id, f"{queries.BY_ID}{job.id}", job.spec.name):
            raise token_scopes.limited(self.user, f"job {job_id}")
        return job

    async def run_in_thread(self, function: Callable[[*Arguments], T], *args: *Arguments) -> T:
        """For handlers of users that run in the event loop: with a slot, but only until it ends."""
        assert self.slot is not None
        await self.slot.acquire()
        try:
            return await USERS.run(function, *args)
        finally:
            self.slot.release()

    def path_param(self, name: str) -> str:
        return _without_null(name, self.request.path_params[name])

    def query_text(self, name: str) -> str | None:
        return self.query.get(name) or None

    def query_int(self, name: str, default: T, *, least: int = 0, most: int = 2**53) -> int | T:
        text = self.query_text(name)
        if text is None:
            return default
        digits = len(text) <= _MAX_DIGITS and text.isascii() and text.isdigit()
        if not digits or not least <= int(text) <= most:
            raise must_be(f"an integer from {least} to {most}", text, name)
        return int(text)

    def query_time(self, name: str) -> datetime | None:
        text = self.query_text(name)
        if text is None:
            return None
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            example = "2026-05-01T00:00:00Z"
            raise must_be(f"a time such as {example}", text, name) from None
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)

    def parse_body(self, kind: type[T]) -> T:
        return check_bounds(from_json(self.body, kind, "request body"))

    def read_query(self) -> None:
        known = [param.name for param in self.route.params]
        self.query = {}
        for name, value in self.request.query_params.multi_items():
            if name not in known:
                raise unknown("parameter", name, known)
            _without_null(name, value)
            # A repeated parameter is a list.
            self.query[name] = f"{self.query[name]},{value}" if name in self.query else value

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, rejected as soon as it is too large."""
        async for chunk in self._received():
            yield chunk
        await self._check_after_body()

    async def read_body(self) -> None:
        """Once; nothing the second time."""
        if not self.body_complete:
            self.body = b"".join([chunk async for chunk in self._received()])
            self.body_complete = True
            await self._check_after_body()

    async def _received(self) -> AsyncIterator[bytes]:
        limit, size = self.route.limit, 0
        if declared_length(self.request) > limit:
            raise TooLarge(_too_large(limit))
        stream, began = self.request.stream(), asyncio.get_running_loop().time()
        while True:
            deadline = began + BODY_GRACE_SECONDS + size / BODY_BYTES_PER_SECOND
            try:
                async with asyncio.timeout_at(deadline):
                    chunk = await anext(stream)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise TooSlow(f"the body arrives too slowly: {size} bytes so far") from error
            except ClientDisconnect as error:
                raise BadInput("the connection was closed before the end of the body") from error
            size += len(chunk)
            if size > limit:
                raise TooLarge(_too_large(limit))
            yield chunk

    async def _check_after_body(self) -> None:
        took = self.clock.uptime() - self.checked_at
        if self.on_slow_body is not None and took > SLOW_BODY:
            await self.on_slow_body(self)


def _without_null(name: str, value: str) -> str:
    if "\0" in value:
        raise BadInput(f"{name}: contains a null character")
    return value


def declared_length(request: Request) -> int:
    """The length of the body, as far as the client declares it; 0 if it does not."""
    text = request.headers.get("content-length", "")
    return int(text[:_MAX_DIGITS]) if text.isascii() and text.isdigit() else 0


def _too_large(limit: int) -> str:
    return f"the body is larger than {limit} bytes, the limit of this route"
