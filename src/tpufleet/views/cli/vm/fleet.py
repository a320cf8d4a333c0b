"""`tpu fleet …`: TPU VMs by hand, over zones and workers, with your own Google credentials and no
control plane. The verbs for one node are in `nodes`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import click

from tpufleet.errors import BadInput, FleetError
from tpufleet.model import fleets, topology
from tpufleet.model.fleets import CreatedNode, FleetMember, NodeInfo, NodeRequest
from tpufleet.views.cli import output
from tpufleet.views.cli.output import json_option


class Nodes(Protocol):
    """What the top layer lends us: the cloud."""

    zones: tuple[str, ...]
    project: str

    def get(self, zone: str, name: str) -> NodeInfo: ...
    def create(
        self, zone: str, name: str, wish: NodeRequest, tries: int, delay: float
    ) -> CreatedNode: ...
    def delete(self, zone: str, name: str) -> bool: ...
    def restart(self, zone: str, name: str) -> NodeInfo: ...
    def attach_disks(
        self, zone: str, name: str, disks: Sequence[str], read_only: bool
    ) -> list[str]: ...
    def recreate_if_gone(
        self, member: FleetMember, wish: NodeRequest, tries: int, delay: float
    ) -> CreatedNode | None: ...
    def list_nodes(self, zones: tuple[str, ...]) -> list[NodeInfo]: ...
    def run_parallel(
        self, members: Iterable[FleetMember], act: Callable[[FleetMember], Any]
    ) -> Iterable[tuple[FleetMember, Any]]: ...


OpenNodes = Callable[[str | None], Nodes]  # by project; None: the configured one


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOutcome:
    name: str
    zone: str
    result: str
    words: str = ""


def _zones(text: str | None, nodes: Nodes) -> tuple[str, ...]:
    zones = tuple(part.strip() for part in text.split(",")) if text else nodes.zones
    if not zones:
        raise BadInput("--zones: name some, with commas between, or set tpu_vm.zones in the config")
    return tuple(fleets.check_zone(zone) for zone in dict.fromkeys(zones))


def options(*chosen: Any) -> Callable[[Any], Any]:
    def add(command: Any) -> Any:
        for option in reversed(chosen):
            command = option(command)
        return command

    return add


PROJECT_OPTION = click.option("--project", help="Google Cloud project (default: tpu_vm.project).")
_ZONES = click.option("--zones", help="With commas between (default: tpu_vm.zones).")
_WORKERS = click.option(
    "--workers-per-zone", "--workers_per_zone", type=int, required=True, help="In each zone."
)
_DRY = click.option("--dry-run", is_flag=True, help="Only say what would be done.")
YES_OPTION = click.option("--yes", is_flag=True, help="Do not ask.")
RETRY_OPTIONS = options(
    click.option("--max-retries", "--max_retries", "tries", type=click.IntRange(min=1),
                 default=1_000_000, show_default=True, help="Tries before it is given up."),
    click.option("--retry-delay", "--retry_delay", "delay", type=click.FloatRange(min=0),
                 default=30.0, show_default=True, help="Seconds between two tries."),
)  # fmt: skip
NODE_OPTIONS = options(
    click.option("--type", "--tpu_type", "accelerator", default="v3-8", show_default=True,
                 metavar="TYPE", help="As `tpu types` lists them."),
    click.option("--runtime", default="", help="Software version (default: by generation)."),
    click.option("--preemptible/--no-preemptible", "--spot/--norm", "-pre/-norm", "spot",
                 default=True, help="Capacity that may be taken away (default), or on demand."),
)  # fmt: skip


def fleet_group(open_nodes: OpenNodes) -> click.Group:
    @click.group(
        "fleet",
        short_help="TPU VMs by hand, over zones and workers.",
        epilog="\b\nExample:\n  tpu fleet status --zones us-central1-a,europe-west4-b\n",
    )
    def fleet() -> None:
        """So many workers in each of some zones, named tpu-{region}-{zone letter}-{id}."""

    @fleet.command(
        "create",
        short_help="Create them all, trying again.",
        epilog=example(
            "tpu fleet create --zones us-central1-a,europe-west4-b --workers-per-zone 8 "
            "--type v5e-8"
        ),
    )
    @options(_ZONES, _WORKERS, NODE_OPTIONS, RETRY_OPTIONS, PROJECT_OPTION, _DRY, json_option)
    def create(
        zones: str | None, workers_per_zone: int, accelerator: str, runtime: str, spot: bool,
        tries: int, delay: float, project: str | None, dry_run: bool, as_json: bool,
    ) -> int:  # fmt: skip
        """Create them all side by side, each tried again until it is there."""
        wish = node_request(accelerator, spot, runtime)
        nodes = open_nodes(project)
        members = fleets.fleet_members(_zones(zones, nodes), workers_per_zone)
        return _act(nodes, members, "created", dry_run, as_json, lambda member: nodes.create(
            member.zone, member.name, wish, tries, delay
        ))  # fmt: skip

    @fleet.command(
        "delete",
        short_help="Delete them all.",
        epilog=example("tpu fleet delete --zones us-central1-a --workers-per-zone 8 --yes"),
    )
    @options(_ZONES, _WORKERS, PROJECT_OPTION, YES_OPTION, _DRY, json_option)
    def delete(
        zones: str | None, workers_per_zone: int, project: str | None, yes: bool, dry_run: bool,
        as_json: bool,
    ) -> int:  # fmt: skip
        """Delete them all side by side. Nodes with other names or numbers are left alone."""
        nodes = open_nodes(project)
        members = fleets.fleet_members(_zones(zones, nodes), workers_per_zone)
        if dry_run:
            states = _states(nodes, members)
            members = [member for member in members if states[member.name] != "NOT_FOUND"]
        else:
            where = ", ".join(dict.fromkeys(member.zone for member in members))
            output.confirm(f"Delete {len(members)} nodes in {where}?", yes)
        return _act(nodes, members, "deleted", dry_run, as_json, lambda member: nodes.delete(
            member.zone, member.name
        ))  # fmt: skip

    @fleet.command(
        "recreate-preempted",
        short_help="Make those again that were taken.",
        epilog=example("tpu fleet recreate-preempted --zones us-central1-a --workers-per-zone 8"),
    )
    @options(_ZONES, _WORKERS, NODE_OPTIONS, RETRY_OPTIONS, PROJECT_OPTION, _DRY, json_option)
    def recreate(
        zones: str | None, workers_per_zone: int, accelerator: str, runtime: str, spot: bool,
        tries: int, delay: float, project: str | None, dry_run: bool, as_json: bool,
    ) -> int:  # fmt: skip
        """Make those again that were PREEMPTED, TERMINATED or are missing; leave the others."""
        wish = node_request(accelerator, spot, runtime)
        nodes = open_nodes(project)
        members = fleets.fleet_members(_zones(zones, nodes), workers_per_zone)
        if dry_run:
            states = _states(nodes, members)
            members = [one for one in members if states[one.name] in fleets.GONE_STATES]
        return _act(nodes, members, "recreated", dry_run, as_json, lambda member: nodes.recreate_if_gone(
            member, wish, tries, delay
        ))  # fmt: skip

    @fleet.command("status", epilog=example("tpu fleet status --zones us-central1-a"))
    @options(_ZONES, PROJECT_OPTION, json_option)
    def status(zones: str | None, project: str | None, as_json: bool) -> None:
        """State, health and type of every worker."""
        nodes = open_nodes(project)
        found = [
            node
            for node in nodes.list_nodes(_zones(zones, nodes))
            if fleets.parse_member(node.name)
        ]
        show_nodes(found, as_json)

    @fleet.command(
        "list", short_help="Every node in these zones.", epilog=example("tpu fleet list --json")
    )
    @options(_ZONES, PROJECT_OPTION, json_option)
    def list_(zones: str | None, project: str | None, as_json: bool) -> None:
        """Every node of the project in these zones, whoever made it."""
        nodes = open_nodes(project)
        show_nodes(nodes.list_nodes(_zones(zones, nodes)), as_json)

    return fleet


@contextmanager
def interruptible(hint: str) -> Iterator[None]:
    """Ctrl-C ends the waiting, not what the cloud was asked for: the words say what to do."""
    try:
        yield
    except KeyboardInterrupt:
        output.print_status(f"interrupted: {hint}")
        raise


def leftover_hint(undo: str) -> str:
    return f"what was asked for may still come; `{undo}` takes it away"


# What a person should know who did not wait to the end, by what was to be done.
_UNFINISHED = {
    "created": leftover_hint("tpu fleet delete"),
    "recreated": leftover_hint("tpu fleet delete"),
    "deleted": "some may still be there; `tpu fleet status` shows them",
}


def _states(nodes: Nodes, members: Sequence[FleetMember]) -> dict[str, str]:
    """What there is of each now, by one listing of each zone."""
    zones = tuple(dict.fromkeys(member.zone for member in members))
    found = {node.name: node.state for node in nodes.list_nodes(zones)}
    return {member.name: found.get(member.name, "NOT_FOUND") for member in members}


def node_request(accelerator: str, spot: bool, runtime: str) -> NodeRequest:
    """Refuses a type that there is not, before anything is done."""
    kind = topology.find(accelerator)
    return NodeRequest(accelerator=kind.name, spot=spot, runtime=runtime)


def example(line: str) -> str:
    return f"\b\nExample:\n  {line}\n"


def _act(
    nodes: Nodes,
    members: list[FleetMember],
    done: str,
    dry_run: bool,
    as_json: bool,
    act: Callable[[FleetMember], Any],
) -> int:
    """Side by side, a line for each as it comes. 1 when any failed."""
    if dry_run:
        show_outcomes(
            [
                NodeOutcome(name=one.name, zone=one.zone, result=f"would be {done}")
                for one in members
            ],
            as_json,
        )
        return 0
    outcomes = []
    with interruptible(_UNFINISHED[done]):
        for count, (member, answer) in enumerate(nodes.run_parallel(members, act), 1):
            outcomes.append(_outcome(member, answer, done))
            output.print_status(f"{count}/{len(members)} {member.name}: {outcomes[-1].result}")
    show_outcomes(sorted(outcomes, key=_in_order), as_json)
    counts = Counter(item.result for item in outcomes)
    output.print_status(", ".join(f"{count} {result}" for result, count in counts.items()))
    return int(any(item.result == "failed" for item in outcomes))


def _in_order(item: NodeOutcome | NodeInfo) -> tuple[str, int, str]:
    """By zone, and worker 2 before worker 10."""
    return item.zone, len(item.name), item.name


def _outcome(member: FleetMember, answer: Any, done: str) -> NodeOutcome:
    where = {"name": member.name, "zone": member.zone}
    if isinstance(answer, FleetError):
        return NodeOutcome(**where, result="failed", words=str(answer))
    if answer is None:
        return NodeOutcome(**where, result="left alone")
    if isinstance(answer, CreatedNode) and answer.already_existed:
        return NodeOutcome(**where, result="was there")
    return NodeOutcome(**where, result="was not there" if answer is False else done)


def show_outcomes(outcomes: list[NodeOutcome], as_json: bool) -> None:
    if as_json:
        output.print_json({"nodes": outcomes})
        return
    output.print_table(
        ("NAME", "ZONE", "RESULT", "WORDS"),
        ((item.name, item.zone, item.result, item.words or "-") for item in outcomes),
        "nothing to do",
    )


def show_nodes(found: list[NodeInfo], as_json: bool) -> None:
    found = sorted(found, key=_in_order)
    if as_json:
        output.print_json({"nodes": found})
        return
    output.print_table(
        ("NAME", "STATE", "HEALTH", "TYPE", "CAPACITY", "ZONE"),
        (
            (node.name, node.state, node.health or "-", node.accelerator or "-",
             node.capacity or "-", node.zone)
            for node in found
        ),
        "no nodes",
    )  # fmt: skip
