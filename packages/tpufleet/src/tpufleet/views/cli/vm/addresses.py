"""Finding a node that a command connects to with ssh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpufleet.errors import FleetError
from tpufleet.model.fleet import fleets
from tpufleet.views.cli.vm.options import zone_of
from tpufleet.views.cli.vm.remote_commands import NodeAddress

if TYPE_CHECKING:
    from tpufleet.compose.providers import ManualNodes


def node_address(nodes: ManualNodes, name: str, zone: str | None) -> NodeAddress:
    return NodeAddress(name=name, zone=zone_of(name, zone), project=nodes.project)


def ready_node_address(nodes: ManualNodes, name: str, zone: str | None) -> NodeAddress:
    node = node_address(nodes, name, zone)
    state = nodes.get(node.zone, name).state
    if state != "READY":
        raise not_ready(name, state)
    return node


def not_ready(name: str, state: str) -> FleetError:
    return FleetError(
        f"{name} is {fleets.display_state(state)}, not ready\n  next: tpu vm status {name}"
    )
