"""`tpu vm fleet …`: TPU VMs over zones and workers, with your Google credentials and no control
plane. The commands for one node are in `nodes`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from tpufleet.errors import BadInput, FleetError
from tpufleet.model.fleet import fleets
from tpufleet.model.fleet.fleets import CreatedNode, FleetMember, NodeInfo
from tpufleet.views.cli import output
from tpufleet.views.cli.output import example, json_option, options
from tpufleet.views.cli.registry import shared_option
from tpufleet.views.cli.vm.options import (
    FLEET_TYPE,
    NODE_OPTIONS,
    RETRY_OPTIONS,
    interruptible,
    node_request,
    open_nodes,
)
from tpufleet.views.cli.vm.outcomes import NodeOutcome, NodeResult, show_nodes, show_outcomes

if TYPE_CHECKING:
    from tpufleet.compose.providers import ManualNodes

_WORKERS = click.option(
    "--workers-per-zone", "--workers_per_zone", type=int, required=True, help="In each zone."
)
# After an interrupt.
_LEFTOVERS = (
    "nodes may remain, or still be created; `tpu vm fleet list` lists them, `tpu vm fleet delete` "
    "deletes them"
)


@click.group(
    epilog=example("tpu vm fleet list --zones us-central1-a,europe-west4-b"),
)
def fleet() -> None:
    """Manage workers in several zones (--zones), named tpu-{region}-{zone letter}-{id}."""


@fleet.command(
    epilog=example(
        "tpu vm fleet create --zones us-central1-a,europe-west4-b --workers-per-zone 8 --type v5e-8"
    ),
)
@options(_WORKERS, NODE_OPTIONS, RETRY_OPTIONS, output.dry_run_option, json_option)
def create(
    workers_per_zone: int,
    accelerator: str | None,
    runtime: str,
    spot: bool,
    autostop: timedelta | None,
    tries: int,
    delay: float,
    dry_run: bool,
) -> int:
    """Create the workers that are missing, preempted or terminated, in parallel; each is retried
    until it is ready."""
    request = node_request(accelerator or FLEET_TYPE, spot, runtime, autostop)
    nodes = open_nodes()
    members = fleets.fleet_members(_zones(nodes), workers_per_zone)
    if dry_run:
        states = _states(nodes, members)
        missing = [each for each in members if states[each.name] in fleets.GONE_STATES]
        return _show_planned(missing, NodeResult.WOULD_CREATE)
    return _act(
        nodes,
        members,
        NodeResult.CREATED,
        lambda member: nodes.create(member.zone, member.name, request, tries, delay),
    )


@fleet.command(
    epilog=example("tpu vm fleet delete --zones us-central1-a --workers-per-zone 8 --yes"),
)
@options(_WORKERS, output.yes_option, output.dry_run_option, json_option)
def delete(workers_per_zone: int, yes: bool, dry_run: bool) -> int:
    """Delete all workers in parallel. TPU VMs with other names or numbers are not touched."""
    nodes = open_nodes()
    members = fleets.fleet_members(_zones(nodes), workers_per_zone)
    if dry_run:
        states = _states(nodes, members)
        existing = [each for each in members if states[each.name] != "NOT_FOUND"]
        return _show_planned(existing, NodeResult.WOULD_DELETE)
    where = ", ".join(dict.fromkeys(member.zone for member in members))
    output.confirm_deletion(f"{len(members)} TPU VMs in {where}", yes)
    return _act(
        nodes,
        members,
        NodeResult.DELETED,
        lambda member: nodes.delete(member.zone, member.name),
    )


@fleet.command("autostop", epilog=example("tpu vm fleet autostop --zones us-central1-a"))
@options(output.dry_run_option, json_option)
def autostop(dry_run: bool) -> int:
    """Delete the TPU VMs whose --autostop time is over. A server with the same project and zones
    does so by itself; without one, run this from cron."""
    nodes = open_nodes()
    expired = nodes.expired(_listed_zones(nodes))
    if dry_run:
        return _show_planned(expired, NodeResult.WOULD_DELETE)
    outcomes = []
    for node in expired:
        nodes.delete(node.zone, node.name)
        outcomes.append(NodeOutcome(name=node.name, zone=node.zone, result=NodeResult.DELETED))
    show_outcomes(outcomes)
    return 0


@fleet.command("list", epilog=example("tpu vm fleet list --json"))
@json_option
def list_() -> None:
    """List every TPU VM of the project, in all zones or these: state, health, type and capacity."""
    nodes = open_nodes()
    show_nodes(nodes.list_nodes(_listed_zones(nodes)))


def _listed_zones(nodes: ManualNodes) -> Sequence[str]:
    """`tpu vm apply` makes nodes in any zone, configured or not."""
    return _zones(nodes) if shared_option("zone") else nodes.all_zones()


def _zones(nodes: ManualNodes) -> tuple[str, ...]:
    option = shared_option("zone")
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


def _show_planned(nodes: Sequence[FleetMember | NodeInfo], planned: NodeResult) -> int:
    show_outcomes([NodeOutcome(name=one.name, zone=one.zone, result=planned) for one in nodes])
    return 0


def _act(
    nodes: ManualNodes,
    members: list[FleetMember],
    success: NodeResult,
    action: Callable[[FleetMember], Any],
) -> int:
    """In parallel, with a status line for each as it finishes. 1 when any failed."""
    outcomes = []
    with interruptible(_LEFTOVERS):
        for count, (member, answer) in enumerate(nodes.run_parallel(members, action), 1):
            outcomes.append(_outcome(member, answer, success))
            output.print_status(f"{count}/{len(members)} {member.name}: {outcomes[-1].result}")
    show_outcomes(outcomes)
    counts = Counter(item.result for item in outcomes)
    output.print_status(", ".join(f"{count} {result}" for result, count in counts.items()))
    return int(any(item.result is NodeResult.FAILED for item in outcomes))


def _outcome(member: FleetMember, answer: Any, success: NodeResult) -> NodeOutcome:
    result, message = success, ""
    if isinstance(answer, FleetError):
        result, message = NodeResult.FAILED, str(answer)
    elif answer is False:
        result = NodeResult.NOT_FOUND
    elif isinstance(answer, CreatedNode) and answer.already_existed:
        result = NodeResult.EXISTS
    return NodeOutcome(name=member.name, zone=member.zone, result=result, message=message)
