"""The commented cluster.yaml that `tpu cluster init` writes, generated from the fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any

from tpufleet_gke.environment.config import sections
from tpufleet_gke.environment.config.field_kinds import default_of, is_required
from tpufleet_gke.environment.config.sections import Environment

SCHEMA_FILE = "cluster.schema.json"
HEADER = f"""\
# yaml-language-server: $schema={SCHEMA_FILE}
# The GKE environment. Lines with `#` show defaults; remove the `#` to change one.
#   tpu cluster plan       what would change, and its cost per hour
#   tpu cluster apply      make it so
#   tpu cluster doctor     check what is there
"""
# Sections that are mappings by name: an entry to show, and its class.
ENTRIES: Mapping[str, tuple[str, type]] = {
    "cpu_pools": ("cpu", sections.CpuPool),
    "gpu_pools": ("l4", sections.GpuPool),
    "tpu_pools": ("v5e", sections.TpuPool),
    "buckets": ("artifacts", sections.Bucket),
    "teams": ("training", sections.Team),
}
LONGEST_VALUE = 50  # a longer one has its description on a line of its own
OPTIONAL = {
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
    for item in fields(Environment):
        lines.append(f"# {item.metadata['description']}")
        if item.name in chosen:
            value = chosen[item.name]
            lines.append(f"{item.name}:{value}" if "\n" in value else f"{item.name}: {value}")
            if item.name in ENTRIES:
                lines += _comments(ENTRIES[item.name][1], 4, without=value)
        else:
            lines += _field(item, 0)
        lines.append("")
    return "\n".join(lines)


def _field(item: Field[Any], indent: int) -> Iterator[str]:
    """A field that keeps its default, as comments."""
    pad = "# " + " " * indent
    if item.name in ENTRIES and indent == 0:
        name, cls = ENTRIES[item.name]
        yield f"{pad}{item.name}:"
        yield f"{pad}  {name}:"
        yield from _comments(cls, indent + 4)
        return
    value = None if is_required(item) else default_of(item)
    section = OPTIONAL.get(item.name) or (type(value) if is_dataclass(value) else None)
    if section is not None:
        yield f"{pad}{item.name}:"
        yield from _comments(section, indent + 2)
        return
    text = item.metadata["example"] if is_required(item) else shown(value)
    yield f"{pad}{item.name}: {text}"


def _comments(cls: type, indent: int, without: str = "") -> Iterator[str]:
    """The fields of a section; those in the text `without` are set already."""
    shown = [item for item in fields(cls) if f" {item.name}:" not in without]
    entries = [(item.metadata["description"], list(_field(item, indent))) for item in shown]
    short = [lines[0] for _, lines in entries if len(lines[0]) <= LONGEST_VALUE]
    width = max(map(len, short), default=0)
    for description, (line, *rest) in entries:
        if len(line) > LONGEST_VALUE:
            yield f"# {' ' * indent}# {description}"
            yield line
        else:
            yield f"{line:<{width}}  # {description}"
        yield from rest


def shown(value: Any) -> str:
    """A default as it is written in the file."""
    if value in ("", None):
        return ""
    if isinstance(value, tuple):
        return "[" + ", ".join(str(item) for item in value) + "]"
    if isinstance(value, (bool, int, float, Mapping)):
        return json.dumps(value)
    return str(value)
