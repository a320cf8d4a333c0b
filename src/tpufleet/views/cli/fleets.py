"""`tpu fleet …`, and `tpu apply|reapply|delete|restart|describe|check-status`: TPU VMs by hand,
with your own Google credentials and no control plane."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import click

from tpufleet.errors import BadInput, FleetError
from tpufleet.model import fleets
from tpufleet.model.fleets import Member, NodeFacts, NodeWish
from tpufleet.views.cli import output
from tpufleet.views.cli.output import json_option


class Nodes(Protocol):
    """What the top layer lends us: the cloud."""

    zones: tuple[str, ...]

    def get(self, zone: str, name: str) -> NodeFacts: ...
    def create(self, zone: str, name: str, wish: NodeWish, tries: int, delay: float) -> NodeFacts:
        ...

    def delete(self, zone: str, name: str) -> None: ...
    def restart(self, zone: str, name: str) -> NodeFacts: ...
    def mend(self, member: Member, wish: NodeWish, tries: int, delay: float) -> NodeFacts | None:
        ...

    def listing(self, zones: tuple[str, ...]) -> list[NodeFacts]: ...
    def together(
        self, members: Iterable[Member], act: Callable[[Member], Any]
    ) -> Iterable[tuple[Member, Any]]: ...


Open = Callable[[str | None], Nodes]  # by project; None: the configured one


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    name: str
    zone: str
    result: str
    words: str = ""


def _zones(text: str | None, nodes: Nodes) -> tuple[str, ...]:
    zones = tuple(part.strip() for part in text.split(",")) if text else nodes.zones
    if not zones:
        raise BadInput("--zones: name some, with commas between")
    return zones


def _options(*chosen: Any) -> Callable[[Any], Any]:
    def add(command: Any) -> Any:
        for option in reversed(chosen):
            command = option(command)
        return command

    return add


_PROJECT = click.option("--project", help="Google Cloud project (default: tpu_vm.project).")
_ZONES = click.option("--zones", help="With commas between (default: tpu_vm.zones).")
_WORKERS = click.option(
    "--workers-per-zone", "--workers_per_zone", type=int, required=True, help="In each zone."
)
_DRY = click.option("--dry-run", is_flag=True, help="Only say what would be done.")
_YES = click.option("--yes", is_flag=True, help="Do not ask.")
_TRIES = _options(
    click.option("--max-retries", "--max_retries", "tries", default=1_000_000, show_default=True),
    click.option("--retry-delay", "--retry_delay", "delay", default=30.0, show_default=True),
)
_KIND = _options(
    click.option("--type", "--tpu_type", "accelerator", default="v3-8", show_default=True),
    click.option("--runtime", default="", help="Software version (default: by generation)."),
    click.option("--preemptible/--no-preemptible", "--spot/--norm", "spot", default=True),
)


def fleet_group(open_nodes: Open) -> click.Group:
    @click.group(
        "fleet",
        short_help="TPU VMs by hand, over zones and workers.",
        epilog="\b\nExample:\n  tpu fleet status --zones us-central1-a,europe-west4-b\n",
    )
    def fleet() -> None:
        """So many workers in each of some zones, named tpu-{region}-{zone letter}-{id}."""

    @fleet.command("create", epilog="\b\nExample:\n  tpu fleet create --zones us-central1-a,"
                   "europe-west4-b --workers-per-zone 8 --type v5e-8\n")  # fmt: skip
    @_options(_ZONES, _WORKERS, _KIND, _TRIES, _PROJECT, _DRY, json_option)
    def create(
        zones: str | None, workers_per_zone: int, accelerator: str, runtime: str, spot: bool,
        tries: int, delay: float, project: str | None, dry_run: bool, as_json: bool,
    ) -> int:  # fmt: skip
        """Create them all side by side, each tried again until it is there."""
        nodes = open_nodes(project)
        wish = NodeWish(accelerator=accelerator, spot=spot, runtime=runtime)
        members = fleets.members(_zones(zones, nodes), workers_per_zone)
        return _act(nodes, members, "created", dry_run, as_json, lambda member: nodes.create(
            member.zone, member.name, wish, tries, delay
        ))  # fmt: skip

    @fleet.command(
        "delete",
        epilog=_example("tpu fleet delete --zones us-central1-a --workers-per-zone 8 --yes"),
    )
    @_options(_ZONES, _WORKERS, _PROJECT, _YES, _DRY, json_option)
    def delete(
        zones: str | None, workers_per_zone: int, project: str | None, yes: bool, dry_run: bool,
        as_json: bool,
    ) -> int:  # fmt: skip
        """Delete them all side by side."""
        nodes = open_nodes(project)
        members = fleets.members(_zones(zones, nodes), workers_per_zone)
        if not dry_run:
            output.confirm(f"Delete {len(members)} nodes?", yes)
        return _act(nodes, members, "deleted", dry_run, as_json, lambda member: nodes.delete(
            member.zone, member.name
        ))  # fmt: skip

    @fleet.command(
        "recreate-preempted",
        epilog=_example(
            "tpu fleet recreate-preempted --zones us-central1-a --workers-per-zone 8"
        ),
    )
    @_options(_ZONES, _WORKERS, _KIND, _TRIES, _PROJECT, _DRY, json_option)
    def recreate(
        zones: str | None, workers_per_zone: int, accelerator: str, runtime: str, spot: bool,
        tries: int, delay: float, project: str | None, dry_run: bool, as_json: bool,
    ) -> int:  # fmt: skip
        """Make those again that were PREEMPTED, TERMINATED or are missing; leave the others."""
        nodes = open_nodes(project)
        wish = NodeWish(accelerator=accelerator, spot=spot, runtime=runtime)
        members = fleets.members(_zones(zones, nodes), workers_per_zone)
        if dry_run:
            members = [
                member
                for member in members
                if nodes.get(member.zone, member.name).state in fleets.GONE_STATES
            ]
        return _act(nodes, members, "recreated", dry_run, as_json, lambda member: nodes.mend(
            member, wish, tries, delay
        ))  # fmt: skip

    @fleet.command("status", epilog=_example("tpu fleet status --zones us-central1-a"))
    @_options(_ZONES, _PROJECT, json_option)
    def status(zones: str | None, project: str | None, as_json: bool) -> None:
        """State, health and type of every worker."""
        nodes = open_nodes(project)
        found = [node for node in nodes.listing(_zones(zones, nodes)) if fleets.parse(node.name)]
        _show(found, as_json)

    @fleet.command("list", epilog=_example("tpu fleet list --json"))
    @_options(_ZONES, _PROJECT, json_option)
    def list_(zones: str | None, project: str | None, as_json: bool) -> None:
        """Every node of the project in these zones, whoever made it."""
        nodes = open_nodes(project)
        _show(nodes.listing(_zones(zones, nodes)), as_json)

    return fleet


def node_commands(open_nodes: Open) -> dict[str, Callable[[], click.Command]]:
    """The verbs for one node by name."""
    named = _options(
        click.argument("name"),
        click.option("--zone", help="Needed when the name does not tell it."),
        _PROJECT,
    )

    @_verb("apply", "tpu apply tpu-us-central1-a-0 --type v5e-8")
    @_options(named, _KIND, _TRIES, json_option)
    def apply(
        name: str, zone: str | None, project: str | None, accelerator: str, runtime: str,
        spot: bool, tries: int, delay: float, as_json: bool,
    ) -> None:  # fmt: skip
        """Create one node and wait until it is ready, trying again while that may help."""
        nodes, wish = open_nodes(project), NodeWish(
            accelerator=accelerator, spot=spot, runtime=runtime
        )
        _show([nodes.create(_zone_of(name, zone), name, wish, tries, delay)], as_json)

    @_verb("reapply", "tpu reapply tpu-us-central1-a-0 --type v5e-8 --yes")
    @_options(named, _KIND, _TRIES, _YES, json_option)
    def reapply(
        name: str, zone: str | None, project: str | None, accelerator: str, runtime: str,
        spot: bool, tries: int, delay: float, yes: bool, as_json: bool,
    ) -> None:  # fmt: skip
        """Delete one node and create it again."""
        nodes, where = open_nodes(project), _zone_of(name, zone)
        wish = NodeWish(accelerator=accelerator, spot=spot, runtime=runtime)
        output.confirm(f"Delete {name} and make it again?", yes)
        nodes.delete(where, name)
        _show([nodes.create(where, name, wish, tries, delay)], as_json)

    @_verb("delete", "tpu delete tpu-us-central1-a-0 --yes")
    @_options(named, _YES, json_option)
    def delete(
        name: str, zone: str | None, project: str | None, yes: bool, as_json: bool
    ) -> None:
        """Delete one node, and wait until it is gone."""
        nodes, where = open_nodes(project), _zone_of(name, zone)
        output.confirm(f"Delete {name} in {where}?", yes)
        nodes.delete(where, name)
        _tell([Outcome(name=name, zone=where, result="deleted")], as_json)

    @_verb("restart", "tpu restart tpu-us-central1-a-0")
    @_options(named, json_option)
    def restart(name: str, zone: str | None, project: str | None, as_json: bool) -> None:
        """Stop one node and start it again; its disk stays."""
        _show([open_nodes(project).restart(_zone_of(name, zone), name)], as_json)

    @_verb("describe", "tpu describe tpu-us-central1-a-0")
    @_options(named, json_option)
    def describe(name: str, zone: str | None, project: str | None, as_json: bool) -> None:
        """Everything that the cloud says of one node."""
        found = open_nodes(project).get(_zone_of(name, zone), name)
        if as_json:
            output.emit_json(found)
            return
        labels = ", ".join(f"{key}={value}" for key, value in (found.labels or {}).items())
        output.facts([
            ("name", found.name), ("zone", found.zone), ("state", found.state),
            ("health", found.health), ("type", found.accelerator), ("runtime", found.runtime),
            ("capacity", found.capacity), ("addresses", ", ".join(found.addresses)),
            ("labels", labels), ("the cloud says", found.words),
        ])  # fmt: skip

    @_verb("check-status", "tpu check-status tpu-us-central1-a-0")
    @_options(named, json_option)
    def check_status(name: str, zone: str | None, project: str | None, as_json: bool) -> None:
        """The state of one node, in one word: ready, preempted, creating, … or not found."""
        found = open_nodes(project).get(_zone_of(name, zone), name)
        if as_json:
            output.emit_json({"name": name, "state": found.state})
        else:
            click.echo(found.state.lower().replace("_", " "))

    made = (apply, reapply, delete, restart, describe, check_status)
    return {str(command.name): (lambda found=command: found) for command in made}


def _verb(name: str, example: str) -> Callable[[Any], click.Command]:
    return click.command(name, epilog=_example(example))


def _example(line: str) -> str:
    return f"\b\nExample:\n  {line}\n"


def _zone_of(name: str, zone: str | None) -> str:
    known = fleets.parse(name)
    if zone is not None:
        return zone
    if known is None:
        raise BadInput(f"--zone: {name!r} does not tell where it is; say so")
    return known.zone


def _act(
    nodes: Nodes,
    members: list[Member],
    done: str,
    dry_run: bool,
    as_json: bool,
    act: Callable[[Member], Any],
) -> int:
    """Side by side, a line for each as it comes. 1 when any failed."""
    if dry_run:
        _tell(
            [Outcome(name=one.name, zone=one.zone, result=f"would be {done}") for one in members],
            as_json,
        )
        return 0
    outcomes = []
    for count, (member, answer) in enumerate(nodes.together(members, act), 1):
        if isinstance(answer, FleetError):
            outcome = Outcome(name=member.name, zone=member.zone, result="failed",
                              words=str(answer))  # fmt: skip
        else:
            left_alone = done == "recreated" and answer is None
            outcome = Outcome(
                name=member.name, zone=member.zone, result="left alone" if left_alone else done
            )
        outcomes.append(outcome)
        click.echo(f"{count}/{len(members)} {outcome.name}: {outcome.result}", err=True)
    _tell(sorted(outcomes, key=lambda item: (item.zone, len(item.name), item.name)), as_json)
    return int(any(item.result == "failed" for item in outcomes))


def _tell(outcomes: list[Outcome], as_json: bool) -> None:
    if as_json:
        output.emit_json({"nodes": outcomes})
        return
    output.table(
        ("NAME", "ZONE", "RESULT", "WORDS"),
        ((item.name, item.zone, item.result, item.words or "-") for item in outcomes),
        "nothing to do",
    )


def _show(found: list[NodeFacts], as_json: bool) -> None:
    if as_json:
        output.emit_json({"nodes": found})
        return
    output.table(
        ("NAME", "STATE", "HEALTH", "TYPE", "CAPACITY", "ZONE"),
        (
            (node.name, node.state, node.health or "-", node.accelerator or "-",
             node.capacity or "-", node.zone)
            for node in found
        ),
        "no nodes",
    )  # fmt: skip
