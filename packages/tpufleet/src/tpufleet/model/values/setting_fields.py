"""Sections of a config file whose fields are those of a dataclass."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

from tpufleet.errors import BadInput, SettingErrors
from tpufleet.model.values import encoding

PROBLEMS: Mapping[Any, str] = {
    bool: "is neither true nor false",
    int: "is not a whole number",
    str: "is not text; put it in quotes",
    timedelta: "is not a duration; write 90s, 30m or 24h",
}
_EXAMPLES = {
    "zones": "us-central1-a",
    "tags": "tpu-host",
    "topology_aware": "v5e-16",
    "data_disks": "{source: projects/PROJECT/zones/ZONE/disks/NAME}",
}


def decode(
    document: Mapping[str, Any],
    kind: type,
    normalize: Callable[[str, Any], Any],
    errors: SettingErrors,
) -> dict[str, Any]:
    """The valid ones, by name; what is wrong with the others is added to `errors`. `normalize` is
    called with the name and the value as it is written, and may raise BadInput."""
    values: dict[str, Any] = {}
    hints, known = get_type_hints(kind), sorted(item.name for item in dataclasses.fields(kind))
    for key, value in document.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            errors.add(str(key), f"unknown field; {hint}")
            continue
        with errors.collect(key):
            valid = _without_invalid(normalize(key, value), hints[key], key, errors)
            if valid is not None:
                values[key] = encoding.from_builtins(valid, hints[key])
    return values


def _without_invalid(value: Any, kind: Any, path: str, errors: SettingErrors) -> Any:
    """The valid part of a list or mapping, or the valid value; None if nothing is valid."""
    try:
        encoding.from_builtins(value, kind)
        return value
    except BadInput:
        pass
    origin, arguments = get_origin(kind), get_args(kind)
    if type(None) in arguments:  # optional
        return _without_invalid(value, arguments[0], path, errors)
    if origin is tuple:
        return _valid_items(value, arguments[0], path, errors)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            errors.add(path, "must be a mapping of names to values, such as {NAME: VALUE}")
            return None
        parts = {
            str(key): _without_invalid(item, arguments[1], f"{path}.{key}", errors)
            for key, item in value.items()
        }
        return {key: item for key, item in parts.items() if item is not None} or None
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.name in value:
                _without_invalid(value[field.name], hints[field.name], path, errors)
            elif field.default is dataclasses.MISSING:
                errors.add(f"{path}.{field.name}", "required")
        return None
    if isinstance(kind, type) and issubclass(kind, Enum):
        problem = f"is not one of {', '.join(each.value for each in kind)}"
    else:
        problem = PROBLEMS.get(kind, "is not a mapping of fields to values")
    errors.add(path, f"{_short(value)} {problem}")
    return None


def _valid_items(value: Any, kind: Any, path: str, errors: SettingErrors) -> Any:
    if not isinstance(value, list | tuple):
        is_enum = isinstance(kind, type) and issubclass(kind, Enum)
        example = next(iter(kind)).value if is_enum else _EXAMPLES.get(path, "NAME")
        things = "values" if is_enum else path.replace("_", " ")
        errors.add(path, f"must be a list of {things}, such as [{example}]")
        return None
    items = [_without_invalid(item, kind, path, errors) for item in value]
    return [item for item in items if item is not None] or None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
