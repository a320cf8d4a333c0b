"""`tpu vm check-env` and `tpu vm repair`: check and repair one TPU VM, with ssh through gcloud."""

from __future__ import annotations

import click

from tpufleet.errors import NotFound
from tpufleet.model.fleet import fleets
from tpufleet.model.fleet.fleets import NodeRequest
from tpufleet.views.cli import output
from tpufleet.views.cli.output import json_option
from tpufleet.views.cli.vm import remote_commands
from tpufleet.views.cli.vm.addresses import node_address, not_ready
from tpufleet.views.cli.vm.options import (
    DELAY,
    NODE_ARGUMENTS,
    TRIES,
    interruptible,
    open_nodes,
    options,
    undo_hint,
)
from tpufleet.views.cli.vm.outcomes import NodeResult, show_outcomes


@click.command("check-env")
@options(NODE_ARGUMENTS, json_option)
def check_env(name: str, zone: str | None, as_json: bool) -> int:
    """Check which chips JAX sees on every host of a node, with ssh through gcloud.

    The exit status is 1 when it sees none.
    """
    node = node_address(open_nodes(), name, zone)
    outcome = remote_commands.check_devices(node)
    show_outcomes([outcome], as_json)
    return int(outcome.result is not NodeResult.OK)


@click.command("repair")
@options(NODE_ARGUMENTS, output.yes_option, json_option)
def repair(name: str, zone: str | None, yes: bool, as_json: bool) -> int:
    """Repair a node: create it again if it was preempted, remove stale locks, check the chips.

    No process is killed. The exit status is 1 when the node is still unusable.
    """
    nodes = open_nodes()
    node = node_address(nodes, name, zone)
    info = nodes.get(node.zone, name)
    if info.state in fleets.GONE_STATES:
        if not info.accelerator:
            raise NotFound(f"no node {name!r}\n  next: `tpu vm apply {name}` creates it")
        request = NodeRequest(
            accelerator=info.accelerator, spot=info.capacity == "spot", runtime=info.runtime
        )
        output.confirm(f"{name} is {fleets.display_state(info.state)}. Create it again?", yes)
        with interruptible(undo_hint(name, node.zone)):
            nodes.delete(node.zone, name)
            nodes.create(node.zone, name, request, TRIES, DELAY)
    elif info.state != "READY":
        raise not_ready(name, info.state)
    outcome = remote_commands.check_devices(node)
    if outcome.result is NodeResult.CHIPS_IN_USE:
        output.print_status(f"{name}: {outcome.message}; removing stale locks")
        remote_commands.remove_stale_locks(node)
        outcome = remote_commands.check_devices(node)
    show_outcomes([outcome], as_json)
    return int(outcome.result is not NodeResult.OK)
