"""The route table's rows: what each route takes, who may call it, and what a handler is handed."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from tpufleet.clocks import Clock
from tpufleet.errors import BadInput, Unauthorized
from tpufleet.model.encoding import from_json
from tpufleet.model.users import Role
from tpufleet.service import identifiers
from tpufleet.service.auth import Caller
from tpufleet.service.commands import CommandContext
from tpufleet.service.event_streams import EventHub
from tpufleet.service.files.archived import Archive
from tpufleet.service.files.logs import LogFiles
from tpufleet.service.files.results import ResultFiles
from tpufleet.service.heartbeats import Heartbeats
from tpufleet.service.host_commands import HostCommandQueue
from tpufleet.service.queries import EndedJobRows
from tpufleet.service.submission import JobStorage
from tpufleet.stores.base import Store

T = TypeVar("T")
API_PREFIX = "/api/v1"
SLICE_TOKEN = "slice"  # instead of a role: an agent, by the token of its slice
DEFAULT_BODY_LIMIT = 256 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceDependencies:
    """What the service is built from."""

    store: Store
    clock: Clock
    secret: bytes  # slice tokens follow from it
    state: Path  # folder for logs, snapshots, secrets and checkpoints
    wake: Callable[[], None] = lambda: None  # the controller has something to do
    providers: tuple[str, ...] = ("local",)
    faults: tuple[str, ...] = ()  # that a provider can be asked to inject
    snapshot_limit: int = 512 * 1024 * 1024
    checkpoints: str | None = None  # folder or URL; `<state>/checkpoints` when missing
    archive: Archive | None = None  # keeps snapshots and logs beyond the life of this disk


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceComponents:
    """What the handlers work with."""

    deps: ServiceDependencies
    storage: JobStorage
    logs: LogFiles
    results: ResultFiles
    heartbeats: Heartbeats
    hub: EventHub
    ended_job_rows: EndedJobRows
    host_commands: HostCommandQueue
    openapi: bytes = b""


class MediaType(StrEnum):
    """What a route answers with."""

    JSON = "application/json"
    TEXT = "text/plain; charset=utf-8"
    EVENTS = "text/event-stream"
    ARCHIVE = "application/gzip"
    BYTES = "application/octet-stream"


class TooLarge(BadInput):
    """The body is larger than this route takes."""


@dataclass(frozen=True, slots=True)
class Param:
    name: str
    description: str
    number: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    method: str
    path: str  # below the prefix
    role: Role | str
    summary: str
    handler: Callable[[ApiCall], Any]
    params: tuple[Param, ...] = ()
    body: Any = None  # type of the JSON body; bytes for a raw one
    response: Any = None
    media_type: MediaType = MediaType.JSON
    limit: int = DEFAULT_BODY_LIMIT
    stream_body: bool = False  # the handler reads the body itself

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.handler)

    @property
    def operation_id(self) -> str:
        return self.handler.__name__


@dataclass(kw_only=True, slots=True)
class ApiCall:
    """One request, as a handler sees it."""

    components: ServiceComponents
    route: Route
    request: Request
    now: datetime
    token: str
    caller: Caller | None = None  # None on the routes of agents
    body: bytes = b""
    query: dict[str, str] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        return self.components.deps.store

    @property
    def user(self) -> Caller:
        if self.caller is None:
            raise Unauthorized("this needs the token of a user")
        return self.caller

    @property
    def context(self) -> CommandContext:
        return CommandContext(store=self.store, caller=self.user, now=self.now)

    def path_param(self, name: str) -> str:
        value = self.request.path_params[name]
        if "\0" in value:
            raise BadInput(f"{name}: holds a null character")
        return value

    def query_text(self, name: str) -> str | None:
        return self.query.get(name) or None

    def query_int(self, name: str, default: T, *, least: int = 0, most: int = 2**53) -> int | T:
        text = self.query_text(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit()) or not least <= int(text[:20]) <= most:
            span = f"from {least} to {most}"
            raise BadInput(f"{name}: a whole number {span} is needed, not {text[:40]!r}")
        return int(text)

    def parse_body(self, kind: type[T]) -> T:
        return from_json(self.body, kind)

    def read_params(self) -> None:
        known = [param.name for param in self.route.params]
        for name, value in self.request.query_params.multi_items():
            if name not in known:
                raise BadInput(
                    f"{name[:40]!r}: unknown parameter{identifiers.suggestion(name, known)}"
                )
            if "\0" in value:
                raise BadInput(f"{name}: holds a null character")
            # Given twice means both, for the parameters that take a list.
            self.query[name] = f"{self.query[name]},{value}" if name in self.query else value

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, refused as soon as it is too large."""
        limit, size = self.route.limit, 0
        told = self.request.headers.get("content-length", "0")
        if told.isdigit() and int(told[:20]) > limit:
            raise TooLarge(_too_large(limit))
        try:
            async for chunk in self.request.stream():
                size += len(chunk)
                if size > limit:
                    raise TooLarge(_too_large(limit))
                yield chunk
        except ClientDisconnect as error:
            raise BadInput("the connection ended in the middle of the body") from error

    async def read_body(self) -> None:
        self.body = b"".join([chunk async for chunk in self.chunks()])


def _too_large(limit: int) -> str:
    return f"the body is larger than {limit} bytes, which is the most that this route takes"
