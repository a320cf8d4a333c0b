"""Sections of a config file whose fields are those of a dataclass."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from tpufleet.errors import SettingErrors
from tpufleet.model import encoding


def decode(
    document: Mapping[str, Any],
    kind: type,
    normalize: Callable[[str, Any], Any],
    errors: SettingErrors,
) -> dict[str, Any]:
    """The valid ones, by name; what is wrong with the others is added to `errors`. `normalize` is
    called with the name and the value as it is written, and may raise BadInput."""
    values: dict[str, Any] = {}
    hints, known = get_type_hints(kind), sorted(item.name for item in fields(kind))
    for key, value in document.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            errors.add(str(key), f"unknown field; {hint}")
            continue
        with errors.collect(key):
            values[key] = encoding.from_builtins(normalize(key, value), hints[key])
    return values
