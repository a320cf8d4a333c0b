"""Generated resources held against the schema of Google's provider."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tpufleet_gke.environment.config.sections import Environment
from tpufleet_gke.environment.terraform.hcl import Block, Call, Expression, Nested
from tpufleet_gke.environment.terraform.stages import StageName, stage_blocks
from tpufleet_testbed.terraform.google_provider import provider_schema

LANGUAGE = {"lifecycle", "depends_on", "provider", "count", "for_each"}  # not the provider's


def resources(environment: Environment, kind: str = "") -> list[Block]:
    return [
        block
        for stage in StageName
        for blocks in stage_blocks(environment, stage).values()
        for block in blocks
        if block.kind == "resource" and (not kind or block.labels[0] == kind)
    ]


def node_pool(environment: Environment, name: str) -> Mapping[str, Any]:
    pools = resources(environment, "google_container_node_pool")
    return next(block.body for block in pools if block.body["name"] == name)


def errors(block: Block) -> list[str]:
    """What the provider would reject: unknown or missing arguments, wrong types."""
    kind, _ = block.labels
    declared = provider_schema()["resources"]
    if kind not in declared:
        return [f"{block.address}: unknown resource"]
    return list(_body(block.body, declared[kind]["arguments"], block.address))


def _body(body: Mapping[str, Any], arguments: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, entry in arguments.items():
        if entry.get("required") and name not in body:
            yield f"{path}.{name}: required"
    for name, value in body.items():
        if name in LANGUAGE:
            continue
        if name not in arguments:
            yield f"{path}.{name}: unknown argument"
            continue
        entry, where = arguments[name], f"{path}.{name}"
        items = value if isinstance(value, (list, tuple)) else [value]
        nested = bool(items) and all(isinstance(item, Nested) for item in items)
        if nested != ("block" in entry):
            yield f"{where}: {'an argument' if nested else 'a block'}, written as the other"
        elif nested:
            if len(items) > 1 and not entry["many"]:
                yield f"{where}: at most one"
            for item in items:
                yield from _body(item, entry["block"], where)
        elif not _fits(value, entry["type"]):
            yield f"{where}: {value!r} is not a {entry['type']}"


def _fits(value: Any, declared: Any) -> bool:
    if isinstance(value, (Expression, Call)):
        return True
    if isinstance(declared, list):
        kind, inner = declared
        if kind == "map":
            return isinstance(value, Mapping) and all(_fits(item, inner) for item in value.values())
        return isinstance(value, (list, tuple)) and all(_fits(item, inner) for item in value)
    types = {"string": str, "bool": bool, "number": (int, float)}
    return isinstance(value, types[declared]) and isinstance(value, bool) == (declared == "bool")
