"""Fault plans of the emulators: YAML files that are read by the schema layer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tpufleet import schema
from tpufleet.errors import BadInput, unknown

T = TypeVar("T")


def load(kind: type[T], path: Path) -> T:
    try:
        return parse(kind, path.read_text())
    except (OSError, UnicodeDecodeError, BadInput) as error:
        raise BadInput(f"{path}: {error}") from error


def parse(kind: type[T], text: str) -> T:
    import yaml

    try:
        document = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise BadInput(str(error)) from error
    return schema.parse(kind, document)


def one_of(label: str, names: Iterable[str]) -> msgspec.Meta:
    known = list(names)

    def check(value: Any) -> str:
        if value in known:
            return str(value)
        raise unknown(label, value, known)

    return schema.custom(label, check)
