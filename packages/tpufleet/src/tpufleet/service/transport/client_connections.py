"""Connections of clients. Between requests a connection is small, because most of them belong to
agents that send one heartbeat a minute. Heartbeats are answered here, without the cost of the other
routes; any other request, and every heartbeat that is not accepted as it stands, is passed to
uvicorn's HTTP/1.1 protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from uvicorn.server import ServerState

from tpufleet.service.transport.connection_limits import (
    ConnectionLimits,
    ConnectionTable,
    LimitedConnection,
    RestingConnection,
    unreceived_bytes,
)

HEARTBEAT_PATH = "/api/v1/agent/beat"
_REQUEST_LINE = f"POST {HEARTBEAT_PATH} HTTP/1.1\r\n".encode()
_END_OF_HEAD = b"\r\n\r\n"
_MAX_HEAD, _MAX_BODY = 4096, 64 * 1024  # larger ones are passed on
# Anything that changes how the request is read is passed on.
_PASSED_ON = frozenset(
    {b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"te", b"trailer"}
)


@dataclass(frozen=True, slots=True)
class HeartbeatRequest:
    """A request to the heartbeat route, as received."""

    token: str
    body: bytes


@dataclass(frozen=True, slots=True)
class HeartbeatResponse:
    """`headers`: lines that end with CRLF."""

    status: bytes
    headers: bytes
    body: bytes


class HeartbeatEndpoint(Protocol):
    """Answers heartbeats of known agents."""

    def admit(self, request: HeartbeatRequest) -> Awaitable[HeartbeatResponse] | None:
        """None when the request is not accepted as it stands."""
        ...


class Parsed(Enum):
    INCOMPLETE = "incomplete"
    OTHER = "other"  # not a plain heartbeat


def parse_heartbeat(data: bytes) -> HeartbeatRequest | Parsed:
    """Strict: whatever is unusual is not a plain heartbeat."""
    if not data.startswith(_REQUEST_LINE):
        return Parsed.INCOMPLETE if _REQUEST_LINE.startswith(data) else Parsed.OTHER
    end = data.find(_END_OF_HEAD)
    if end < 0:
        return Parsed.INCOMPLETE if len(data) <= _MAX_HEAD else Parsed.OTHER
    if end > _MAX_HEAD or not data[:end].isascii():
        return Parsed.OTHER
    headers: dict[bytes, bytes] = {}
    for line in data[len(_REQUEST_LINE) : end].split(b"\r\n"):
        name, colon, value = line.partition(b":")
        name = name.lower()
        # A name without a colon, with a space, or twice; a value that continues on the next line.
        if not colon or name in headers or name in _PASSED_ON or not _is_token(name):
            return Parsed.OTHER
        if any(mark in value for mark in b"\r\n\0"):
            return Parsed.OTHER
        headers[name] = value.strip(b" \t")
    length = headers.get(b"content-length", b"")
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if (
        not length.isdigit()
        or len(length) > len(str(_MAX_BODY))
        or int(length) > _MAX_BODY
        or scheme.lower() != b"bearer"
        or headers.get(b"connection", b"keep-alive").lower() != b"keep-alive"
        or b"host" not in headers
    ):
        return Parsed.OTHER
    body = data[end + len(_END_OF_HEAD) :]
    if len(body) < int(length):
        return Parsed.INCOMPLETE
    if len(body) > int(length):
        return Parsed.OTHER  # another request follows at once
    return HeartbeatRequest(token.strip().decode(), body)


def _is_token(name: bytes) -> bool:
    return name.replace(b"-", b"").isalnum()


class ClientConnection(asyncio.Protocol):
    """A connection between requests, and during heartbeats."""

    __slots__ = (
        "_busy",
        "_closing",
        "_endpoint",
        "_make_http",
        "_received",
        "_state",
        "_table",
        "_transport",
        "authenticated",
    )

    def __init__(
        self,
        table: ConnectionTable,
        state: ServerState,
        endpoint: HeartbeatEndpoint | None,
        make_http: Callable[[RestingConnection], LimitedConnection],
    ) -> None:
        self._table = table
        self._state = state
        self._endpoint = endpoint
        self._make_http = make_http
        self._received = b""  # of a heartbeat that is not complete
        self._busy = False  # answering a heartbeat
        self._closing = False
        self.authenticated = False

    # The base class has a more general transport.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._state.connections.add(self)  # type: ignore[arg-type]  # for shutdown, all it calls
        self._table.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._state.connections.discard(self)
        self._table.remove(self)

    def resume(self, authenticated: bool) -> None:
        """After a request that was passed on; no other has been received."""
        self.authenticated = authenticated
        self._transport.set_protocol(self)
        self._state.connections.add(self)  # type: ignore[arg-type]
        self._table.add_idle(self)

    def data_received(self, data: bytes) -> None:
        if self not in self._table:
            return  # it was closed
        self._received += data
        if self._busy:
            if len(self._received) > _MAX_BODY:
                self._transport.pause_reading()  # until the heartbeat before is answered
            return
        self._table.start_request(self)
        request = Parsed.OTHER if self._endpoint is None else parse_heartbeat(self._received)
        if request is Parsed.INCOMPLETE:
            return
        answer = None
        if isinstance(request, HeartbeatRequest) and self._endpoint is not None:
            answer = self._endpoint.admit(request)
        if answer is None:
            self._pass_on()
            return
        self._received, self._busy, self.authenticated = b"", True, True
        self._table.end_request(self)
        task = asyncio.ensure_future(self._respond(answer))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    async def _respond(self, answer: Awaitable[HeartbeatResponse]) -> None:
        response = await answer
        self._state.total_requests += 1
        self._busy = False
        if self._closing and self._transport.is_closing():
            return
        close = self._closing or not self._table.keeps_idle
        self._transport.write(
            b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n%b\r\n%b"
            % (
                response.status,
                response.headers,
                len(response.body),
                b"connection: close\r\n" if close else b"",
                response.body,
            )
        )
        if close:
            self._transport.close()
        elif self._received:  # sent before it was answered, which agents do not do
            self._transport.resume_reading()
            self._pass_on()
        else:
            self._table.rest(self)

    def _pass_on(self) -> None:
        """What was received, and the connection with it."""
        received, self._received = self._received, b""
        self._state.connections.discard(self)
        self._table.remove(self)
        http = self._make_http(self)
        http.authenticated = self.authenticated
        self._transport.set_protocol(http)
        http.connection_made(self._transport)
        http.data_received(received)

    def is_too_slow(self, seconds: float, limits: ConnectionLimits) -> bool:
        if _END_OF_HEAD in self._received:
            return seconds > limits.body_grace_seconds
        return seconds > limits.header_seconds

    def pause_writing(self) -> None:
        self._table.start_sending(self)  # an agent that does not read the replies

    def resume_writing(self) -> None:
        self._table.end_sending(self)

    @property
    def unsent(self) -> int:
        return self._table.unsent(self._transport)

    @property
    def unreceived(self) -> int:
        return unreceived_bytes(self._table, self._transport)

    def on_sent(self) -> None:
        pass

    def abort(self) -> None:
        self._transport.abort()

    def shutdown(self) -> None:
        """Called by uvicorn. A heartbeat that was received is answered."""
        self._closing = True
        if not self._busy:
            self._transport.close()
