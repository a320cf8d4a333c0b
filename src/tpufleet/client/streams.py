"""Streams that outlive the server: one that goes away and comes back is heard from where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tpufleet.client import sse
from tpufleet.client.transport import Transport
from tpufleet.errors import Unreachable

_FIRST_WAIT, _LONGEST_WAIT = 0.2, 5.0


def messages(
    transport: Transport,
    path: str,
    params: Mapping[str, Any],
    last: str | None,
    *,
    patience: float,
    sleep: Callable[[float], None],
) -> Iterator[sse.ServerSentEvent]:
    """Reconnects from the last id until the message `last` comes. Gives up when nothing could
    be heard for as long as `patience` lasts."""
    at: str | None = None
    waited, wait = 0.0, _FIRST_WAIT
    while True:
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": at} if at else {})
        try:
            with transport.stream(path, params=params, headers=headers) as response:
                for message in sse.parse_events(response.iter_bytes()):
                    waited, wait = 0.0, _FIRST_WAIT
                    at = message.id if message.id is not None else at
                    if message.kind == last:
                        return
                    yield message
        except Unreachable:
            if transport.closed:
                return
            if waited >= patience:
                raise
        sleep(wait)
        waited, wait = waited + wait, min(wait * 2, _LONGEST_WAIT)
