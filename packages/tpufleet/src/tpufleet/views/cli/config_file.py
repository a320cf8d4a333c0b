"""Saves settings in the config file of the user, where that loses nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def has(file: Path, key: str) -> bool:
    return file.exists() and key in (yaml.safe_load(file.read_text()) or {})


def save(file: Path, changes: Mapping[str, Any]) -> bool:
    """Merge in `changes`, also into mappings of the file. False, with nothing written, if comments
    of the file would be lost."""
    text = file.read_text() if file.exists() else ""
    current: dict[str, Any] = yaml.safe_load(text) or {}
    merged = _merged(current, changes)
    if merged == current:
        return True
    if "#" not in text:
        _write(file, _dump(merged))
        return True
    if any(key in current for key in changes):
        return False
    _write(file, f"{text.rstrip()}\n{_dump(dict(changes))}")
    return True


def remove(file: Path, settings: Mapping[str, Any]) -> list[str]:
    """Remove settings that still have these values; their names."""
    text = file.read_text() if file.exists() else ""
    current: dict[str, Any] = yaml.safe_load(text) or {}
    gone = [key for key, value in settings.items() if key in current and current[key] == value]
    if not gone:
        return []
    lines = [
        line
        for line in text.splitlines()
        if not any(line.startswith(f"{key}:") for key in gone)  # each was written on one line
    ]
    _write(file, "\n".join([*lines, ""]))
    return gone


def _merged(current: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(current)
    for key, value in changes.items():
        known = merged.get(key)
        both = isinstance(known, dict) and isinstance(value, Mapping)
        merged[key] = _merged(known, value) if both else value  # type: ignore[arg-type]  # checked
    return merged


def _dump(document: dict[str, Any]) -> str:
    # Wide: values stay on one line.
    return yaml.safe_dump(document, sort_keys=False, width=4096)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.touch(mode=0o600)
    draft.write_text(text)
    os.replace(draft, file)
