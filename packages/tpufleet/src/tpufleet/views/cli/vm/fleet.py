"""`tpu vm fleet …`: TPU VMs over zones and workers, with your Google credentials and no control
plane. The commands for one node are in `nodes`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from tpufleet.errors import BadInput, FleetError
from tpufleet.model.fleet import fleets
from tpufleet.model.fleet.fleets import CreatedNode, FleetMember
from tpufleet.views.cli import output
from tpufleet.views.cli.output import json_option
from tpufleet.views.cli.vm.options import (
    FLEET_TYPE,
    NODE_OPTIONS,
    RETRY_OPTIONS,
    example,
    interruptible,
    leftover_hint,
    node_request,
    open_nodes,
    options,
)
from tpufleet.views.cli.vm.outcomes import NodeOutcome, NodeResult, show_nodes, show_outcomes

if TYPE_CHECKING:
    from tpufleet.compose.providers import ManualNodes

_ZONES = click.option("--zones", help="Comma-separated zones (default: tpu_vm.zones).")
_WORKERS = click.option(
    "--workers-per-zone", "--workers_per_zone", type=int, required=True, help="In each zone."
)
_DRY_RUN_RESULTS = {
    NodeResult.CREATED: NodeResult.WOULD_CREATE,
    NodeResult.RECREATED: NodeResult.WOULD_RECREATE,
    NodeResult.DELETED: NodeResult.WOULD_DELETE,
}
# What to do after an interrupt.
_INTERRUPT_HINTS = {
    NodeResult.CREATED: leftover_hint("tpu vm fleet delete"),
    NodeResult.RECREATED: leftover_hint("tpu vm fleet delete"),
    NodeResult.DELETED: "some nodes may remain; list them with `tpu vm fleet status`",
}


@click.group(
    epilog="\b\nExample:\n  tpu vm fleet status --zones us-central1-a,europe-west4-b\n",
)
def fleet() -> None:
    """Manage workers in several zones, named tpu-{region}-{zone letter}-{id}."""


@fleet.command(
    epilog=example(
        "tpu vm fleet create --zones us-central1-a,europe-west4-b --workers-per-zone 8 --type v5e-8"
    ),
)
@options(_ZONES, _WORKERS, NODE_OPTIONS, RETRY_OPTIONS, output.dry_run_option, json_option)
def create(
    zones: str | None,
    workers_per_zone: int,
    accelerator: str | None,
    runtime: str,
    spot: bool,
    autostop: str | None,
    tries: int,
    delay: float,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Create all workers in parallel, each retried until it is ready."""
    request = node_request(accelerator or FLEET_TYPE, spot, runtime, autostop)
    nodes = open_nodes()
    members = fleets.fleet_members(_zones(zones, nodes), workers_per_zone)

    def create_member(member: FleetMember) -> Any:
        return nodes.create(member.zone, member.name, request, tries, delay)

    return _act(nodes, members, NodeResult.CREATED, dry_run, as_json, create_member)


@fleet.command(
    epilog=example("tpu vm fleet delete --zones us-central1-a --workers-per-zone 8 --yes"),
)
@options(_ZONES, _WORKERS, output.yes_option, output.dry_run_option, json_option)
def delete(
    zones: str | None,
    workers_per_zone: int,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Delete all workers in parallel. Nodes with other names or numbers are not touched."""
    nodes = open_nodes()
    members = fleets.fleet_members(_zones(zones, nodes), workers_per_zone)
    if dry_run:
        states = _states(nodes, members)
        members = [member for member in members if states[member.name] != "NOT_FOUND"]
    else:
        where = ", ".join(dict.fromkeys(member.zone for member in members))
        output.confirm(f"Delete {len(members)} nodes in {where}?", yes)

    def delete_member(member: FleetMember) -> Any:
        return nodes.delete(member.zone, member.name)

    return _act(nodes, members, NodeResult.DELETED, dry_run, as_json, delete_member)


@fleet.command(
    "recreate-preempted",
    epilog=example("tpu vm fleet recreate-preempted --zones us-central1-a --workers-per-zone 8"),
)
@options(_ZONES, _WORKERS, NODE_OPTIONS, RETRY_OPTIONS, output.dry_run_option, json_option)
def recreate(
    zones: str | None,
    workers_per_zone: int,
    accelerator: str | None,
    runtime: str,
    spot: bool,
    autostop: str | None,
    tries: int,
    delay: float,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Create the workers again that are PREEMPTED, TERMINATED or missing."""
    request = node_request(accelerator or FLEET_TYPE, spot, runtime, autostop)
    nodes = open_nodes()
    members = fleets.fleet_members(_zones(zones, nodes), workers_per_zone)
    if dry_run:
        states = _states(nodes, members)
        members = [one for one in members if states[one.name] in fleets.GONE_STATES]

    def recreate_member(member: FleetMember) -> Any:
        return nodes.recreate_if_gone(member, request, tries, delay)

    return _act(nodes, members, NodeResult.RECREATED, dry_run, as_json, recreate_member)


@fleet.command("status", epilog=example("tpu vm fleet status --zones us-central1-a"))
@options(_ZONES, json_option)
def status(zones: str | None, as_json: bool) -> None:
    """Show state, health and type of every worker."""
    nodes = open_nodes()
    listed = nodes.list_nodes(_zones(zones, nodes))
    show_nodes([node for node in listed if fleets.parse_member(node.name)], as_json)


@fleet.command("autostop", epilog=example("tpu vm fleet autostop --zones us-central1-a"))
@options(_ZONES, output.dry_run_option, json_option)
def autostop(zones: str | None, dry_run: bool, as_json: bool) -> int:
    """Delete the nodes whose --autostop time is over. A server with the same project and zones does
    so by itself; without one, run this from cron."""
    nodes = open_nodes()
    outcomes = []
    for node in nodes.expired(_zones(zones, nodes)):
        result = NodeResult.WOULD_DELETE if dry_run else NodeResult.DELETED
        if not dry_run:
            nodes.delete(node.zone, node.name)
        outcomes.append(NodeOutcome(name=node.name, zone=node.zone, result=result))
    show_outcomes(outcomes, as_json)
    return 0


@fleet.command("list", epilog=example("tpu vm fleet list --json"))
@options(_ZONES, json_option)
def list_(zones: str | None, as_json: bool) -> None:
    """List every node of the project in these zones, with any name."""
    nodes = open_nodes()
    show_nodes(nodes.list_nodes(_zones(zones, nodes)), as_json)


def _zones(option: str | None, nodes: ManualNodes) -> tuple[str, ...]:
    zones = tuple(part.strip() for part in option.split(",")) if option else nodes.zones
    if not zones:
        raise BadInput(
            "no zones; pass --zones us-central1-a,europe-west4-b, or set tpu_vm.zones in the config"
        )
    return tuple(fleets.check_zone(zone) for zone in dict.fromkeys(zones))


def _states(nodes: ManualNodes, members: Sequence[FleetMember]) -> dict[str, str]:
    """The current state of each, with one listing per zone."""
    zones = tuple(dict.fromkeys(member.zone for member in members))
    states = {node.name: node.state for node in nodes.list_nodes(zones)}
    return {member.name: states.get(member.name, "NOT_FOUND") for member in members}


def _act(
    nodes: ManualNodes,
    members: list[FleetMember],
    success: NodeResult,
    dry_run: bool,
    as_json: bool,
    action: Callable[[FleetMember], Any],
) -> int:
    """In parallel, with a status line for each as it finishes. 1 when any failed."""
    if dry_run:
        planned = _DRY_RUN_RESULTS[success]
        show_outcomes(
            [NodeOutcome(name=one.name, zone=one.zone, result=planned) for one in members], as_json
        )
        return 0
    outcomes = []
    with interruptible(_INTERRUPT_HINTS[success]):
        for count, (member, answer) in enumerate(nodes.run_parallel(members, action), 1):
            outcomes.append(_outcome(member, answer, success))
            output.print_status(f"{count}/{len(members)} {member.name}: {outcomes[-1].result}")
    show_outcomes(outcomes, as_json)
    counts = Counter(item.result for item in outcomes)
    output.print_status(", ".join(f"{count} {result}" for result, count in counts.items()))
    return int(any(item.result is NodeResult.FAILED for item in outcomes))


def _outcome(member: FleetMember, answer: Any, success: NodeResult) -> NodeOutcome:
    result, message = success, ""
    if isinstance(answer, FleetError):
        result, message = NodeResult.FAILED, str(answer)
    elif answer is None:
        result = NodeResult.UNCHANGED
    elif answer is False:
        result = NodeResult.NOT_FOUND
    elif isinstance(answer, CreatedNode) and answer.already_existed:
        result = NodeResult.EXISTS
    return NodeOutcome(name=member.name, zone=member.zone, result=result, message=message)
