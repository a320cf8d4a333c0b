"""Model objects to JSON and back: one form for the store, the API and `--json`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from tpufleet.errors import BadInput

T = TypeVar("T")
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
# msgspec crashes the process when two threads first use the same type at the same time.
_type_lock = threading.Lock()
# msgspec lets errors from invalid UTF-8 and from deep nesting through unchanged.
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def to_json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def to_builtins(value: Any) -> Any:
    """Only dicts, lists or tuples, strings and numbers."""
    return msgspec.to_builtins(value)


def from_json(data: bytes | str, kind: type[T], name: str = "") -> T:
    """`name`: what errors call it, where readers do not know the name of the type."""
    return _checked(lambda: _decoder(kind).decode(data), name or _name(kind))


def from_builtins(value: Any, kind: type[T]) -> T:
    _decoder(kind)  # resolves the type under the lock
    return _checked(lambda: msgspec.convert(value, kind), _name(kind))


def _checked(decode: Callable[[], T], name: str) -> T:
    try:
        return decode()
    except _DECODE_ERRORS as error:
        raise BadInput(f"not a valid {name}: {error}") from error


def _name(kind: object) -> str:
    return getattr(kind, "__name__", str(kind))


def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    decoder = _decoders.get(kind)
    if decoder is None:
        with _type_lock:
            decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    return decoder
