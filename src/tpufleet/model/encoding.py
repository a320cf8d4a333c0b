"""Model objects to JSON and back: one form for the store, the wire and `--json`."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

from tpufleet.errors import BadInput

T = TypeVar("T")
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
# While msgspec works out a type, another thread that meets the same type crashes the process.
_working_out = threading.Lock()
# Bytes that are no text, and nesting without end, are told apart from other faults by msgspec.
_NOT_VALID = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def to_json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def to_builtins(value: Any) -> Any:
    """Dicts, lists or tuples, strings and numbers only."""
    return msgspec.to_builtins(value)


def from_json(data: bytes | str, kind: type[T]) -> T:
    try:
        return _decoder(kind).decode(data)
    except _NOT_VALID as error:
        raise BadInput(f"not a valid {getattr(kind, '__name__', kind)}: {error}") from error


def from_builtins(value: Any, kind: type[T]) -> T:
    _decoder(kind)  # the type is worked out now
    try:
        return msgspec.convert(value, kind)
    except _NOT_VALID as error:
        raise BadInput(f"not a valid {getattr(kind, '__name__', kind)}: {error}") from error


def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    found = _decoders.get(kind)
    if found is None:
        with _working_out:
            found = _decoders[kind] = msgspec.json.Decoder(kind)
    return found
