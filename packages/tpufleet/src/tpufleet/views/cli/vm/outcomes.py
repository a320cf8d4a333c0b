"""What became of each node, and how nodes are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tpufleet.model.fleet import fleets
from tpufleet.model.fleet.fleets import NodeInfo
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.views.cli import output


class NodeResult(StrEnum):
    CREATED = "created"
    DELETED = "deleted"
    EXISTS = "already exists"
    NOT_FOUND = "not found"
    FAILED = "failed"
    OK = "ok"
    DONE = "done"
    MOUNTED = "mounted"
    CHIPS_IN_USE = "chips in use"
    NO_JAX = "no JAX"
    NO_ACCOUNT = "no account"
    NO_SSH = "no ssh"
    NO_ANSWER = "no answer"
    WOULD_CREATE = "would be created"
    WOULD_DELETE = "would be deleted"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOutcome:
    name: str
    zone: str
    result: NodeResult
    message: str = ""


def show_outcomes(outcomes: Iterable[NodeOutcome]) -> None:
    ordered = sorted(outcomes, key=_by_zone_and_number)
    output.print_table(
        ("NAME", "ZONE", "RESULT", "MESSAGE"),
        ((item.name, item.zone, item.result.value, item.message or "-") for item in ordered),
        value={"nodes": ordered},
    )


def show_nodes(nodes: Sequence[NodeInfo]) -> None:
    ordered = sorted(nodes, key=_by_zone_and_number)
    output.print_table(
        ("NAME", "STATE", "HEALTH", "TYPE", "CAPACITY", "ZONE", "AUTOSTOP"),
        (
            (node.name, node.state, node.health or "-", short_name(node.accelerator) or "-",
             node.capacity or "-", node.zone, _autostop(node))
            for node in ordered
        ),
        value={"nodes": ordered},
    )  # fmt: skip


def _autostop(node: NodeInfo) -> str:
    end = fleets.expires_at(node.labels)
    return "-" if end is None else f"{end:%Y-%m-%d %H:%M} UTC"


def _by_zone_and_number(item: NodeOutcome | NodeInfo) -> tuple[str, int, str]:
    """Worker 2 before worker 10."""
    return item.zone, len(item.name), item.name
