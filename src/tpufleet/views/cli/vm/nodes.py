"""The verbs for one TPU VM by name: `tpu apply`, `reapply`, `delete`, `restart`, `describe` and
`check-status`. With your own Google credentials, and no control plane. Those that reach into a
node are in `shells`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from tpufleet.errors import BadInput, NotFound
from tpufleet.model import fleets
from tpufleet.model.fleets import NodeInfo, NodeRequest
from tpufleet.views.cli import output
from tpufleet.views.cli.output import json_option
from tpufleet.views.cli.vm.fleet import (
    NODE_OPTIONS,
    PROJECT_OPTION,
    RETRY_OPTIONS,
    YES_OPTION,
    NodeOutcome,
    OpenNodes,
    example,
    interruptible,
    leftover_hint,
    node_request,
    options,
    show_nodes,
    show_outcomes,
)

_TRY_WORD = re.compile(r"(?P<what>[tm])=(?P<number>\d+)")


NODE_ARGUMENTS = options(
    click.argument("name"),
    click.option("--zone", help="Needed when the name does not tell it."),
    PROJECT_OPTION,
)
# `t=10 m=2000` are other spellings of --retry-delay and --max-retries.
RETRY_ARGUMENTS = click.argument("words", nargs=-1, metavar="[t=SECONDS] [m=TRIES]")


def node_commands(open_nodes: OpenNodes) -> dict[str, click.Command]:
    """The verbs for one node by name."""

    @node_command("apply", "tpu apply tpu-us-central1-a-0 --type v5e-8")
    @options(NODE_ARGUMENTS, RETRY_ARGUMENTS, NODE_OPTIONS, RETRY_OPTIONS, json_option)
    @click.pass_context
    def apply(context: click.Context, name: str, zone: str | None, project: str | None,
              as_json: bool, **given: Any) -> None:  # fmt: skip
        """Create one node and wait until it is ready, trying again while that may help."""
        nodes, where = open_nodes(project), zone_of(name, zone)
        wish, (tries, delay) = node_request_from(context, given), retry_limits(given)
        with interruptible(undo_hint(name, where)):
            made = nodes.create(where, name, wish, tries, delay)
        if made.already_existed:
            output.print_status(f"{name} was there already")
        show_nodes([made.node], as_json)

    @node_command("reapply", "tpu reapply tpu-us-central1-a-0 --yes")
    @options(NODE_ARGUMENTS, RETRY_ARGUMENTS, NODE_OPTIONS, RETRY_OPTIONS, YES_OPTION, json_option)
    @click.pass_context
    def reapply(context: click.Context, name: str, zone: str | None, project: str | None,
                yes: bool, as_json: bool, **given: Any) -> None:  # fmt: skip
        """Delete one node and create it again: as it was, unless you say otherwise."""
        nodes, where = open_nodes(project), zone_of(name, zone)
        wish = node_request_from(context, given, nodes.get(where, name))
        output.confirm(f"Delete {name} and make it again?", yes)
        tries, delay = retry_limits(given)
        with interruptible(undo_hint(name, where)):
            nodes.delete(where, name)
            made = nodes.create(where, name, wish, tries, delay)
        show_nodes([made.node], as_json)

    @node_command("delete", "tpu delete tpu-us-central1-a-0 --yes")
    @options(NODE_ARGUMENTS, YES_OPTION, json_option)
    def delete(name: str, zone: str | None, project: str | None, yes: bool, as_json: bool) -> None:
        """Delete one node, and wait until it is gone."""
        nodes, where = open_nodes(project), zone_of(name, zone)
        output.confirm(f"Delete {name} in {where}?", yes)
        with interruptible(f"it may still be there; `tpu check-status {name}` tells"):
            was_there = nodes.delete(where, name)
        result = "deleted" if was_there else "was not there"
        show_outcomes([NodeOutcome(name=name, zone=where, result=result)], as_json)

    @node_command("restart", "tpu restart tpu-us-central1-a-0")
    @options(NODE_ARGUMENTS, json_option)
    def restart(name: str, zone: str | None, project: str | None, as_json: bool) -> None:
        """Stop one node and start it again; its disk stays."""
        nodes, where = open_nodes(project), zone_of(name, zone)
        with interruptible(f"it may be stopped now; `tpu restart {name}` starts it"):
            restarted = nodes.restart(where, name)
        show_nodes([restarted], as_json)

    @node_command("describe", "tpu describe tpu-us-central1-a-0")
    @options(NODE_ARGUMENTS, json_option)
    def describe(name: str, zone: str | None, project: str | None, as_json: bool) -> None:
        """Everything that the cloud says of one node."""
        where = zone_of(name, zone)
        found = open_nodes(project).get(where, name)
        if found.state == "NOT_FOUND":
            raise NotFound(f"there is no {name} in {where}; `tpu fleet list` shows what there is")
        if as_json:
            output.print_json(found)
            return
        labels = ", ".join(f"{key}={value}" for key, value in (found.labels or {}).items())
        output.print_fields([
            ("name", found.name), ("zone", found.zone), ("state", found.state),
            ("health", found.health), ("type", found.accelerator), ("runtime", found.runtime),
            ("capacity", found.capacity), ("addresses", ", ".join(found.addresses)),
            ("labels", labels), ("the cloud says", found.message),
        ])  # fmt: skip

    @node_command("check-status", "tpu check-status tpu-us-central1-a-0")
    @options(NODE_ARGUMENTS, json_option)
    def check_status(name: str, zone: str | None, project: str | None, as_json: bool) -> None:
        """The state of one node, in one word: ready, preempted, creating, … or not found."""
        found = open_nodes(project).get(zone_of(name, zone), name)
        if as_json:
            output.print_json({"name": name, "state": found.state})
        else:
            click.echo(fleets.display_state(found.state))

    made = (apply, reapply, delete, restart, describe, check_status)
    return {str(command.name): command for command in made}


def node_command(name: str, line: str) -> Callable[[Any], click.Command]:
    return click.command(name, epilog=example(line))


def zone_of(name: str, zone: str | None) -> str:
    """Where the node is. Refuses names and zones that cannot be, before anything is done."""
    known = fleets.parse_member(fleets.check_name(name))
    if zone is not None:
        return fleets.check_zone(zone)
    if known is None:
        raise BadInput(f"--zone: {name!r} does not tell where it is; say so")
    return known.zone


def undo_hint(name: str, zone: str) -> str:
    return leftover_hint(f"tpu delete {name} --zone {zone}")


def node_request_from(
    context: click.Context, given: dict[str, Any], before: NodeInfo | None = None
) -> NodeRequest:
    """What was asked for in words; for the rest what the node was, where that is known."""
    wish = node_request(given["accelerator"], given["spot"], given["runtime"])
    if str(context.info_name).endswith("-norm"):
        return NodeRequest(accelerator=wish.accelerator, spot=False, runtime=wish.runtime)
    if before is None or not before.accelerator:
        return wish
    said = {
        name for name in given
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }  # fmt: skip
    return NodeRequest(
        accelerator=wish.accelerator if "accelerator" in said else before.accelerator,
        spot=wish.spot if "spot" in said else before.capacity == "spot",
        runtime=wish.runtime if said & {"runtime", "accelerator"} else before.runtime,
    )


def retry_limits(given: dict[str, Any]) -> tuple[int, float]:
    tries, delay = given["tries"], given["delay"]
    for word in given["words"]:
        found = _TRY_WORD.fullmatch(word)
        if found is None:
            raise BadInput(f"{word!r} is not understood; t=SECONDS and m=TRIES are")
        if found["what"] == "t":
            delay = float(found["number"])
        else:
            tries = max(1, int(found["number"]))
    return tries, delay
