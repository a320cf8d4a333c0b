"""Limits on connections: how many there may be, and how long a client may take for its TLS
handshake, to send a request, and to receive a response.

When there are too many, the oldest connection without a valid token is closed. So strangers cannot
use up the connections that agents need for their heartbeats.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import resource
import ssl
import sys
import termios
import time
from dataclasses import dataclass
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

AUTHENTICATED = "tpufleet.authenticated"  # set in the scope of a request with a valid token
# In the scope: a coroutine function that returns once the client has the response, or is gone.
RESPONSE_RECEIVED = "tpufleet.response_received"

# File descriptors for the database, logs, uploads and simulated hosts.
RESERVED_DESCRIPTORS = 256
SWEEP_SECONDS = 1.0
# Idle connections that are kept; a connection that rests takes about 5 kB.
MAX_KEPT = 50_000
_MAX_CLOSED_AT_ONCE = 1000
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.01, 0.2  # whether a response was received
TLS_CLOSE_SECONDS = 1.0  # for the client to confirm; idle clients do not


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    connections: int
    strangers: int  # connections that are sending a request and no valid token before
    handshake_seconds: float = 10.0  # of TLS
    header_seconds: float = 10.0  # from the first byte, or the connection, to the last header
    body_grace_seconds: float = 30.0
    body_bytes_per_second: int = 4 * 1024  # after the grace period, on average

    # Without a byte that the client takes of a response. A client with a valid token that leaves a
    # little of it, such as one whose output is read in a pager, may do so for `idle_seconds`.
    unread_seconds: float = 30.0
    unread_bytes: int = 2**20

    # Of clients with a valid token. Longer than the longest heartbeat interval, so that agents keep
    # their connection.
    idle_seconds: float = 600.0

    @classmethod
    def from_system(cls) -> ConnectionLimits:
        """As many as this process may open, less a reserve."""
        connections = max(64, _raise_descriptor_limit() - RESERVED_DESCRIPTORS)
        return cls(connections=connections, strangers=connections // 2)

    @property
    def kept(self) -> int:
        """Connections that may rest between two requests. Beyond that, the server asks agents to
        connect for each heartbeat, so that it never runs out of descriptors or memory."""
        return min(self.connections * 3 // 4, MAX_KEPT)

    @property
    def backlog(self) -> int:
        """All that wait are accepted at once, before any of them is read."""
        return min(2048, max(32, self.strangers // 2))


class TrackedConnection(Protocol):
    """What the table knows of a connection."""

    authenticated: bool

    def is_too_slow(self, seconds: float, limits: ConnectionLimits) -> bool:
        """Whether it has had long enough to send its request."""
        ...

    def abort(self) -> None: ...


class RestingConnection(TrackedConnection, Protocol):
    """A connection between two requests."""

    def resume(self, authenticated: bool) -> None:
        """Take the connection back after a request."""
        ...


class SendingConnection(TrackedConnection, Protocol):
    """A connection with a response that the client has not received."""

    @property
    def unsent(self) -> int:
        """Bytes in memory."""
        ...

    @property
    def unreceived(self) -> int:
        """Bytes that the client has not confirmed; more than `unsent` where the system tells."""
        ...

    def on_sent(self) -> None:
        """Nothing is left in memory."""
        ...


@dataclass(slots=True)
class _Sending:
    unreceived: int
    since: float  # when it last became less


class ConnectionTable:
    """The connections of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._connections: set[TrackedConnection] = set()
        # Connections that are sending a request, and since when; oldest first.
        self._receiving: dict[TrackedConnection, float] = {}
        # Those of them that have not sent a valid token before; oldest first.
        self._strangers: dict[TrackedConnection, None] = {}
        # Those that rest after a request with a valid token, and since when; oldest first.
        self._idle: dict[TrackedConnection, float] = {}
        self._sending: dict[SendingConnection, _Sending] = {}
        # Below encrypted transports, which do not count what these have in memory.
        self._sockets: WeakKeyDictionary[asyncio.Transport, asyncio.Transport] = WeakKeyDictionary()
        self._sweep: asyncio.TimerHandle | None = None
        self._stood_still = 0.0  # seconds in which this process did not run

    def add(self, connection: TrackedConnection) -> None:
        self._connections.add(connection)
        self.start_request(connection)
        self._make_room()

    def add_idle(self, connection: TrackedConnection) -> None:
        self._connections.add(connection)
        self.rest(connection)

    def remove(self, connection: TrackedConnection) -> None:
        self.end_request(connection)
        self._idle.pop(connection, None)
        # The table does not look at the kind of a connection that it forgets.
        self._sending.pop(connection, None)  # type: ignore[call-overload]
        self._connections.discard(connection)

    def rest(self, connection: TrackedConnection) -> None:
        self._idle[connection] = self._now()
        self._schedule_sweep()

    @property
    def keeps_idle(self) -> bool:
        """Whether one more connection may rest."""
        return len(self._idle) < self.limits.kept

    def __contains__(self, connection: TrackedConnection) -> bool:
        return connection in self._connections

    def start_request(self, connection: TrackedConnection) -> None:
        if connection in self._receiving:
            return
        self._idle.pop(connection, None)
        self._receiving[connection] = self._now()
        if not connection.authenticated:
            self._strangers[connection] = None
        self._schedule_sweep()

    def end_request(self, connection: TrackedConnection) -> None:
        self._receiving.pop(connection, None)
        self._strangers.pop(connection, None)

    def start_sending(self, connection: SendingConnection) -> None:
        """It has a response in memory. Until `end_sending`, or until nothing is left of it, the
        client must make progress."""
        if connection not in self._sending:
            self._sending[connection] = _Sending(connection.unreceived, self._now())
            self._schedule_sweep()

    def end_sending(self, connection: SendingConnection) -> None:
        self._sending.pop(connection, None)

    def add_encrypted(self, encrypted: asyncio.Transport, socket: asyncio.Transport) -> None:
        self._sockets[encrypted] = socket

    def unsent(self, transport: asyncio.Transport) -> int:
        below = self._sockets.get(transport)
        return transport.get_write_buffer_size() + (
            below.get_write_buffer_size() if below is not None else 0
        )

    def close_handshakes(self) -> None:
        """At shutdown. Connections with requests are closed by uvicorn."""
        for connection in [each for each in self._connections if isinstance(each, TlsConnection)]:
            self._drop(connection)

    def _make_room(self) -> None:
        """Close the oldest connections of strangers. A request that was received is answered."""
        while self._strangers and (
            len(self._strangers) > self.limits.strangers
            or len(self._connections) > self.limits.connections
        ):
            self._drop(next(iter(self._strangers)))
        while self._idle and len(self._connections) > self.limits.connections:
            self._drop(next(iter(self._idle)))

    def _close_slow(self) -> None:
        assert self._sweep is not None
        late = asyncio.get_running_loop().time() - self._sweep.when()
        if late > SWEEP_SECONDS:
            self._stood_still += late
        self._sweep, now = None, self._now()
        for connection, since in list(self._receiving.items()):
            if connection.is_too_slow(now - since, self.limits):
                self._drop(connection)
        for idle, since in list(itertools.islice(self._idle.items(), _MAX_CLOSED_AT_ONCE)):
            if now - since <= self.limits.idle_seconds:
                break
            self._drop(idle)
        for sending, progress in list(self._sending.items()):
            self._check_progress(sending, progress, now)
        self._schedule_sweep()

    def _check_progress(
        self, connection: SendingConnection, progress: _Sending, now: float
    ) -> None:
        if not connection.unsent:
            self.end_sending(connection)
            connection.on_sent()
            return
        unreceived = connection.unreceived
        if unreceived < progress.unreceived:
            progress.since = now
        progress.unreceived = unreceived
        small = connection.authenticated and connection.unsent <= self.limits.unread_bytes
        if now - progress.since > (
            self.limits.idle_seconds if small else self.limits.unread_seconds
        ):
            self._drop(connection)

    def _now(self) -> float:
        """A clock on which a client that we did not read from is not slow."""
        return time.monotonic() - self._stood_still

    def _schedule_sweep(self) -> None:
        if self._sweep is None and (self._receiving or self._idle or self._sending):
            self._sweep = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._close_slow)

    def _drop(self, connection: TrackedConnection) -> None:
        self.remove(connection)
        connection.abort()


class LimitedConnection(H11Protocol):
    """A connection during requests; `resting` takes it back after each of them."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        table: ConnectionTable,
        resting: RestingConnection,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._table = table
        self._resting = resting
        self._bytes = 0  # of the request that is being received
        self.authenticated = False  # has sent a request with a valid token
        self._handle_request, self.app = self.app, self._handle_request_of_client

    async def _handle_request_of_client(self, scope: Any, receive: Any, send: Any) -> None:
        scope[RESPONSE_RECEIVED] = self._until_received
        await self._handle_request(scope, receive, send)

    async def _until_received(self) -> None:
        # Transports report this only where nothing is encrypted.
        pause = MIN_POLL_SECONDS
        while self in self._table and self.unsent > HIGH_WATER_LIMIT:
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)

    # The base class narrows the parameter as well.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._table.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self not in self._table:
            return  # it was closed
        self._bytes += len(data)
        self._table.start_request(self)
        super().data_received(data)
        if self.cycle is not None and not self.cycle.more_body:
            self._bytes = 0
            self._table.end_request(self)

    def on_response_complete(self) -> None:
        # The body may be incomplete: a request can be rejected before that.
        self.authenticated = self.authenticated or self._token_was_valid
        self._table.end_request(self)
        super().on_response_complete()
        if self.unsent:
            self._unset_keepalive_if_required()  # the client is still receiving
            self._table.start_sending(self)
        elif not self.transport.is_closing():
            self._rest()

    def _rest(self) -> None:
        if self.authenticated and self._table.keeps_idle and self._is_between_requests:
            self._unset_keepalive_if_required()
            self.connections.discard(self)
            self._table.remove(self)
            self._resting.resume(self.authenticated)

    def on_sent(self) -> None:
        if self.cycle is None or not self.cycle.response_complete or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        self._rest()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.authenticated = self.authenticated or self._token_was_valid
        self._table.start_sending(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.cycle is None or not self.cycle.response_complete:
            self._table.end_sending(self)

    @property
    def unsent(self) -> int:
        return self._table.unsent(self.transport)

    @property
    def unreceived(self) -> int:
        return unreceived_bytes(self._table, self.transport)

    @property
    def _is_between_requests(self) -> bool:
        return (
            not self.transport.is_closing()
            and self.conn.our_state is h11.IDLE
            and self.conn.their_state is h11.IDLE
            and self.conn.trailing_data == (b"", False)
        )

    def is_too_slow(self, seconds: float, limits: ConnectionLimits) -> bool:
        """Whether it has had long enough to send its request."""
        if self.cycle is None or self.cycle.response_complete:
            return seconds > limits.header_seconds
        if self.flow.read_paused:
            return False  # it waits for us
        allowed = limits.body_grace_seconds + self._bytes / limits.body_bytes_per_second
        return seconds > allowed

    def abort(self) -> None:
        self.transport.abort()

    @property
    def _token_was_valid(self) -> bool:
        return self.scope is not None and AUTHENTICATED in self.scope


class TlsConnection(asyncio.Protocol):
    """A connection until its TLS handshake is complete. asyncio's own listener does not report
    connections before that, so they could not be counted or limited."""

    authenticated = False

    def __init__(
        self, connection: asyncio.Protocol, context: ssl.SSLContext, table: ConnectionTable
    ) -> None:
        self._connection = connection
        self._context = context
        self._table = table
        self._task: asyncio.Task[None] | None = None  # kept, so that it is not collected
        self._early_data: list[bytes] = []  # came with the last message of the handshake

    # The base class has a more general transport.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.pause_reading()  # the handshake reads
        self._table.add(self)
        if self in self._table:
            self._task = asyncio.get_running_loop().create_task(self._shake_hands())

    async def _shake_hands(self) -> None:
        try:
            encrypted = await asyncio.get_running_loop().start_tls(
                self._transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._table.limits.handshake_seconds,
                ssl_shutdown_timeout=TLS_CLOSE_SECONDS,
            )
        except OSError:  # not TLS, too slow, or disconnected; of which there may be very many
            encrypted = None
        finally:
            self._table.remove(self)
        if encrypted is None or encrypted.is_closing():
            self._transport.abort()
        else:
            encrypted.set_protocol(self._connection)
            transport = cast(asyncio.Transport, FlushedTransport(encrypted, self._table))
            self._table.add_encrypted(transport, self._transport)
            self._connection.connection_made(transport)
            for data in self._early_data:
                self._connection.data_received(data)

    def data_received(self, data: bytes) -> None:
        self._early_data.append(data)

    def is_too_slow(self, seconds: float, limits: ConnectionLimits) -> bool:
        return seconds > limits.handshake_seconds

    def abort(self) -> None:
        self._transport.abort()


class FlushedTransport:
    """An encrypted transport that sends what was written before it closes. asyncio's own has
    TLS_CLOSE_SECONDS for both, and a client may need longer for a large response."""

    def __init__(self, transport: asyncio.Transport, table: ConnectionTable) -> None:
        self._transport = transport
        self._table = table
        self._closing: asyncio.Task[None] | None = None

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._unsent():
            self._transport.close()
            return
        self._transport.pause_reading()
        self._closing = asyncio.get_running_loop().create_task(self._close_when_sent())

    async def _close_when_sent(self) -> None:
        """The table ends connections that make no progress."""
        while self._unsent() and not self._transport.is_closing():
            await asyncio.sleep(MIN_POLL_SECONDS)
        self._transport.close()

    def is_closing(self) -> bool:
        return self._closing is not None or self._transport.is_closing()

    def _unsent(self) -> int:
        return self._table.unsent(cast(asyncio.Transport, self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def unreceived_bytes(table: ConnectionTable, transport: asyncio.Transport) -> int:
    """With those that the system has, and the client has not confirmed: it takes new ones only when
    a third is sent, so a slow client would seem to receive nothing for a while."""
    connection = transport.get_extra_info("socket")
    try:
        answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # closed, or not known here
        return table.unsent(transport)
    return table.unsent(transport) + int.from_bytes(answer, sys.byteorder)


def _raise_descriptor_limit() -> int:
    """To the hard limit, which every process may do for itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 1_048_576
    if soft == resource.RLIM_INFINITY or soft >= hard:
        return hard
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS: the kernel allows fewer than it says
        return soft
    return hard
