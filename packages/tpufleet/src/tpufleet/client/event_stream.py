"""Server-sent events over a stream that reconnects and continues after the last event."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tpufleet.backoff import Backoff
from tpufleet.client.transport import Transport
from tpufleet.errors import Unreachable

_INITIAL_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.2, 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSentEvent:
    event: str  # empty when there is only an id
    data: bytes
    id: str | None = None


def follow(
    transport: Transport,
    path: str,
    params: Mapping[str, Any],
    last: str | None,
    *,
    reconnect_timeout: float,
    sleep: Callable[[float], None],
    interrupted: Callable[[Unreachable], None],
) -> Iterator[ServerSentEvent]:
    """Yield events until one of type `last`. Reconnects with the id of the last event received, and
    calls `interrupted` once per outage; raises Unreachable when no event could be received for
    `reconnect_timeout` seconds."""
    last_id: str | None = None
    told = False
    waited, backoff = 0.0, Backoff(first=_INITIAL_RETRY_SECONDS, longest=_MAX_RETRY_SECONDS)
    while True:
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_id} if last_id else {})
        try:
            with transport.stream(path, params=params, headers=headers) as response:
                for event in parse_events(response.iter_bytes()):
                    waited, told = 0.0, False
                    backoff.succeeded()
                    last_id = event.id if event.id is not None else last_id
                    if event.event == last:
                        return
                    yield event
        except Unreachable as error:
            if transport.closed:
                return
            if waited >= reconnect_timeout:
                raise
            if not told:
                interrupted(error)
            told = True
        delay = backoff.failed()
        sleep(delay)
        waited += delay


def parse_events(chunks: Iterable[bytes]) -> Iterator[ServerSentEvent]:
    """Lines end with \\n only: text inside JSON may contain any other line separator."""
    rest = b""
    for chunk in chunks:
        *blocks, rest = (rest + chunk).split(b"\n\n")
        for block in blocks:
            event = _parse_block(block)
            if event.event or event.id is not None:
                yield event


def _parse_block(block: bytes) -> ServerSentEvent:
    name, data, event_id = "", [], None
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value.decode()
        elif field == b"data":
            data.append(value)
        elif field == b"id":
            event_id = value.decode()
    return ServerSentEvent(event=name, data=b"\n".join(data), id=event_id)
