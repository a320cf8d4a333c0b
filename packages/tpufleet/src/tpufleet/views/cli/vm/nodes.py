"""Commands for one TPU VM by name: `tpu vm apply`, `delete`, `restart`, `describe` and `status`.
They use your Google credentials and no server."""

from __future__ import annotations

from typing import Any

import click

from tpufleet.errors import not_found
from tpufleet.model.fleet import fleets
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.views.cli import output
from tpufleet.views.cli.output import example, json_option, options
from tpufleet.views.cli.vm.options import (
    DELAY,
    NODE_OPTIONS,
    RETRY_OPTIONS,
    TRIES,
    interruptible,
    node_request_from,
    open_nodes,
    undo_hint,
    zone_of,
)
from tpufleet.views.cli.vm.outcomes import NodeOutcome, NodeResult, show_nodes, show_outcomes


@click.command(
    epilog="\b\nExamples:\n  tpu vm apply tpu-us-central1-a-0 --type v5e-8\n"
    "  tpu vm apply tpu-us-central1-a-0 --replace --yes\n"
)
@click.argument("name")
@options(NODE_OPTIONS, RETRY_OPTIONS)
@click.option("--replace", is_flag=True, help="Delete it first, and keep its configuration.")
@output.yes_option
@json_option
@click.pass_context
def apply(context: click.Context, name: str, replace: bool, yes: bool, **values: Any) -> None:
    """Create a TPU VM and wait until it is ready, with retries."""
    nodes, where = open_nodes(), zone_of(name)
    before = nodes.get(where, name) if replace else None
    request = node_request_from(context, name, values, before)
    if before is not None:
        nodes.warn_of_server(before)
        output.confirm_deletion(f"{name} and create it again", yes)
    with interruptible(undo_hint(name, where)):
        if replace:
            nodes.delete(where, name)
        created = nodes.create(where, name, request, values["tries"], values["delay"])
    if created.already_existed:
        output.print_status(f"{name} already exists")
    show_nodes([created.node])


@click.command(epilog=example("tpu vm delete tpu-us-central1-a-0"))
@click.argument("name")
@output.yes_option
@json_option
def delete(name: str, yes: bool) -> None:
    """Delete a TPU VM, and wait until it is gone."""
    nodes, where = open_nodes(), zone_of(name)
    nodes.warn_of_server(nodes.get(where, name))
    output.confirm_deletion(f"{name} in {where}", yes)
    with interruptible(f"check whether it was deleted with `tpu vm status {name}`"):
        existed = nodes.delete(where, name)
    result = NodeResult.DELETED if existed else NodeResult.NOT_FOUND
    show_outcomes([NodeOutcome(name=name, zone=where, result=result)])


@click.command(epilog=example("tpu vm restart tpu-us-central1-a-0"))
@click.argument("name")
@output.yes_option
@json_option
def restart(name: str, yes: bool) -> None:
    """Stop a TPU VM and start it again; its disk is kept. One of several hosts cannot be stopped:
    after a question it is deleted and created again, with an empty boot disk."""
    nodes, where = open_nodes(), zone_of(name)
    hint = f"the TPU VM may be stopped; start it with `tpu vm restart {name}`"
    if nodes.is_recreated_to_restart(where, name):
        nodes.warn_of_server(nodes.get(where, name))
        output.print_status(f"{name} has several hosts, which cannot be stopped")
        output.confirm_deletion("it, with the data on its boot disks, and create it again", yes)
        hint = undo_hint(name, where)
    with interruptible(hint):
        restarted = nodes.restart(where, name, TRIES, DELAY)
    show_nodes([restarted])


@click.command(epilog=example("tpu vm describe tpu-us-central1-a-0"))
@click.argument("name")
@json_option
def describe(name: str) -> None:
    """Show everything that the Cloud TPU API reports about a TPU VM."""
    where = zone_of(name)
    node = open_nodes().get(where, name)
    if node.state == "NOT_FOUND":
        raise not_found(f"TPU VM in {where}", name, "vm fleet list")
    if output.printed_json(node):
        return
    labels = ", ".join(f"{key}={value}" for key, value in (node.labels or {}).items())
    output.print_fields(
        [
            ("name", node.name),
            ("zone", node.zone),
            ("state", node.state),
            ("health", node.health),
            ("type", short_name(node.accelerator)),
            ("runtime", node.runtime),
            ("capacity", node.capacity),
            ("addresses", ", ".join(node.addresses)),
            ("labels", labels),
            ("message", node.message),
        ]
    )


@click.command(epilog=example("tpu vm status tpu-us-central1-a-0"))
@click.argument("name")
@json_option
def status(name: str) -> None:
    """Print the state of a TPU VM: ready, preempted, creating, … or not found."""
    node = open_nodes().get(zone_of(name), name)
    output.print_result({"name": name, "state": node.state}, fleets.display_state(node.state))
