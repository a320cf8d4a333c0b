"""The commented cluster.yaml that `tpu cluster init` writes, generated from the fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tpufleet import schema
from tpufleet.schema import Row
from tpufleet_gke.environment.config import sections
from tpufleet_gke.environment.config.sections import Environment, Section

SCHEMA_FILE = "cluster.schema.json"
HEADER = f"""\
# yaml-language-server: $schema={SCHEMA_FILE}
# The GKE environment. Lines with `#` show defaults; remove the `#` to change one.
#   tpu cluster plan       what would change, and its cost per hour
#   tpu cluster apply      make it so
#   tpu cluster doctor     check what is there
"""
# Sections that are mappings by name: an entry to show, and its class.
ENTRIES: Mapping[str, tuple[str, type[Section]]] = {
    "cpu_pools": ("cpu", sections.CpuPool),
    "gpu_pools": ("l4", sections.GpuPool),
    "tpu_pools": ("v5e", sections.TpuPool),
    "buckets": ("artifacts", sections.Bucket),
    "teams": ("training", sections.Team),
}
LONGEST_VALUE = 50  # a longer one has its description on a line of its own
OPTIONAL: Mapping[str, type[Section]] = {
    "tensorboard": sections.TensorBoard,
    "budget": sections.Budget,
    "existing": sections.ExistingNetwork,
}


def starter_file(project: str, region: str, zones: tuple[str, ...], tpu_type: str) -> str:
    """Valid as it is: one CPU pool, one TPU type left to the provisioner, one team."""
    chosen = {
        "project": project,
        "region": region,
        "zones": f"[{', '.join(zones)}]",
        "tpu_pools": f"\n  {tpu_type}:\n    type: {tpu_type}\n    capacity: spot",
        "teams": "\n  training:\n    namespace: tpu-training",
    }
    lines = [HEADER]
    for row, default in _options(Environment):
        lines.append(f"# {row.description}")
        if row.name in chosen:
            value = chosen[row.name]
            lines.append(f"{row.name}:{value}" if "\n" in value else f"{row.name}: {value}")
            if row.name in ENTRIES:
                lines += _comments(ENTRIES[row.name][1], 4, without=value)
        else:
            lines += _field(row, default, 0)
        lines.append("")
    return "\n".join(lines)


def _options(section: type[Section]) -> list[tuple[Row, Any]]:
    """The fields, each with its default; None for a required one."""
    defaults = [
        None if info.required else info.default_factory()
        if info.default_factory is not msgspec.NODEFAULT else info.default
        for info in msgspec.structs.fields(section)
    ]  # fmt: skip
    return list(zip(schema.rows(section), defaults, strict=True))


def _field(row: Row, default: Any, indent: int) -> Iterator[str]:
    """A field that keeps its default, as comments."""
    pad = "# " + " " * indent
    if row.name in ENTRIES and indent == 0:
        name, entry = ENTRIES[row.name]
        yield f"{pad}{row.name}:"
        yield f"{pad}  {name}:"
        yield from _comments(entry, indent + 4)
        return
    inner = type(default) if isinstance(default, Section) else OPTIONAL.get(row.name)
    if inner is not None:
        yield f"{pad}{row.name}:"
        yield from _comments(inner, indent + 2)
        return
    yield f"{pad}{row.name}: {row.example if row.required else _shown(default)}"


def _comments(section: type[Section], indent: int, without: str = "") -> Iterator[str]:
    """The fields of a section; those in the text `without` are set already."""
    entries = [
        (_described(row, default), list(_field(row, default, indent)))
        for row, default in _options(section)
        if f" {row.name}:" not in without
    ]
    short = [lines[0] for _, lines in entries if len(lines[0]) <= LONGEST_VALUE]
    width = max(map(len, short), default=0)
    for description, (line, *rest) in entries:
        if len(line) > LONGEST_VALUE:
            yield f"# {' ' * indent}# {description}"
            yield line
        else:
            yield f"{line:<{width}}  # {description}"
        yield from rest


def _described(row: Row, default: Any) -> str:
    """With the default in words where the value does not show it."""
    unset = default in ("", None, (), {}) and row.default not in ("none", "required", "")
    return (
        f"{row.description.removesuffix('.')} (default: {row.default})."
        if unset
        else (row.description)
    )


def _shown(value: Any) -> str:
    """A default as it is written in the file."""
    if value in ("", None):
        return ""
    if isinstance(value, tuple):
        return "[" + ", ".join(str(item) for item in value) + "]"
    if isinstance(value, (bool, int, float, Mapping)):
        return json.dumps(value)
    return str(value)
