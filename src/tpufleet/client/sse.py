"""Server-sent events from a stream of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSentEvent:
    kind: str  # empty for a message that carries an id only
    data: bytes
    id: str | None = None


def parse_events(chunks: Iterable[bytes]) -> Iterator[ServerSentEvent]:
    """Lines end with \\n only: text inside JSON may hold every other kind of line end."""
    rest = b""
    for chunk in chunks:
        *blocks, rest = (rest + chunk).split(b"\n\n")
        for block in blocks:
            message = _message(block)
            if message.kind or message.id is not None:
                yield message


def _message(block: bytes) -> ServerSentEvent:
    kind, data, number = "", [], None
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"event":
            kind = value.decode()
        elif name == b"data":
            data.append(value)
        elif name == b"id":
            number = value.decode()
    return ServerSentEvent(kind=kind, data=b"\n".join(data), id=number)
