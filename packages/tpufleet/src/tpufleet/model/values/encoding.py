"""Model objects to JSON and back: one form for the store, the API and `--json`."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Mapping
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

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
    try:
        return _decoder(kind).decode(data)
    except _DECODE_ERRORS as error:
        called = name or getattr(kind, "__name__", str(kind))
        raise BadInput(f"not a valid {called}: {error}") from error


def from_builtins(value: Any, kind: type[T]) -> T:
    _decoder(kind)  # resolves the type under the lock
    try:
        return msgspec.convert(value, kind)
    except _DECODE_ERRORS as error:
        raise BadInput(f"not a valid {getattr(kind, '__name__', kind)}: {error}") from error


class _UnknownValue(Exception):
    """An enum value of another release, without a fallback."""


def from_json_of_any_release(
    data: bytes | str, kind: type[T], fallbacks: Mapping[type[Enum], Enum | None]
) -> T:
    """Like `from_json`, for messages between programs of different releases. Unknown fields are
    ignored, as always. An unknown enum value becomes its fallback; a list item with one that has no
    fallback is left out."""
    try:
        return from_json(data, kind)
    except BadInput as error:
        try:
            known = _known_values(msgspec.json.decode(data), kind, fallbacks)
        except (*_DECODE_ERRORS, _UnknownValue):
            raise error from None
        return from_builtins(known, kind)


def _known_values(value: Any, kind: Any, fallbacks: Mapping[type[Enum], Enum | None]) -> Any:
    """`value`, decoded from JSON, with the unknown enum values of `kind` replaced."""
    arguments = get_args(kind)
    if isinstance(value, dict) and _has_fields(kind):
        hints = get_type_hints(kind)
        return {
            name: _known_values(item, hints[name], fallbacks)
            for name, item in value.items()
            if name in hints
        }
    if isinstance(value, list) and get_origin(kind) is tuple:
        items = []
        for item in value:
            with contextlib.suppress(_UnknownValue):
                items.append(_known_values(item, arguments[0], fallbacks))
        return items
    if get_origin(kind) in (Union, UnionType) and value is not None:
        (kind, *_) = [each for each in arguments if each is not type(None)]
        return _known_values(value, kind, fallbacks)
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str):
        if value in {member.value for member in kind}:
            return value
        if kind not in fallbacks:
            raise _UnknownValue(value)
        fallback = fallbacks[kind]
        return None if fallback is None else fallback.value
    return value


def _has_fields(kind: Any) -> bool:
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return is_struct or dataclasses.is_dataclass(kind)


def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    decoder = _decoders.get(kind)
    if decoder is None:
        with _type_lock:
            decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    return decoder
