"""Reading job files: YAML in, mappings out, with `--set` applied."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from tpufleet.errors import BadInput, invalid, not_yaml, unreadable
from tpufleet.model.values import unique_keys

PROGRAMS = {".py": "python", ".sh": "bash"}


def read(name: str) -> list[tuple[dict[str, Any], Path]]:
    """Each document of a file (`-`: standard input), with the base folder of its paths."""
    if name == "-":
        return [(item, Path.cwd()) for item in documents(sys.stdin.read(), "standard input")]
    path = Path(name)
    if path.suffix in PROGRAMS:
        raise is_program(name, f"{PROGRAMS[path.suffix]} {name}")
    try:
        content = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        hint = "pass a job file, or - for standard input"
        raise unreadable(name, error, hint=hint) from error
    return [(item, path.resolve().parent) for item in documents(content, name)]


def is_program(name: str, command: str) -> BadInput:
    """Where a TPU type or a job file is expected."""
    return BadInput(f"{name}: a program\n  next: `tpu run v5e-16 -- {command}`")


def documents(content: str, source: str) -> list[dict[str, Any]]:
    try:
        items = yaml.load_all(content, Loader=unique_keys.Loader)
        loaded = [item for item in items if item is not None]
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or (str(error) or type(error).__name__)
        raise not_yaml(source, line, problem) from error
    if not loaded:
        raise BadInput(f"{source}: empty file; `command` and `accelerator` are required")
    for item in loaded:
        if not isinstance(item, dict):
            raise BadInput(f"{source}: each document must be a mapping of fields")
    return loaded


def with_overrides(document: dict[str, Any], settings: tuple[str, ...]) -> dict[str, Any]:
    """`--set env.LR=0.1 --set zones=[a,b]`: a dotted path and a YAML value."""
    changed = dict(document)
    for setting in settings:
        path, equals, value = setting.partition("=")
        if not equals or not path:
            raise invalid(setting, "PATH=VALUE", "--set env.LR=0.1", "--set")
        *parents, last = path.split(".")
        inner = changed
        for parent in parents:
            existing = inner.get(parent)
            if existing is not None and not isinstance(existing, dict):
                raise BadInput(f"--set {setting}: {parent} is not a mapping; set {parent}=VALUE")
            inner[parent] = inner = dict(existing or {})
        try:
            inner[last] = yaml.load(value, Loader=unique_keys.Loader)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise not_yaml(f"--set {setting}", "", "quote the value") from error
    return changed
