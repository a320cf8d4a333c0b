"""`tpu extract`: the commands of the workload, and those that run it as jobs.

A worker runs `tpu extract run` and waits for it to start, so what only the other commands need is
imported when they are called.
"""

from __future__ import annotations

import click

from tpufleet.errors import BadInput
from tpufleet.views.cli.registry import LazyCommand
from tpufleet_activations.cli.extract import ExtractGroup
from tpufleet_activations.cli.extract import extract as activations_group

FLEET_COMMANDS = {
    "deploy": LazyCommand(
        "Run a fleet of workers on the dataset in OUT.", "tpufleet_activations.cli.deploy:deploy"
    ),
    "board": LazyCommand(
        "Show the fleet that works on OUT.", "tpufleet_activations.cli.deploy:board"
    ),
}


class FleetGroup(ExtractGroup):
    """The workload's commands, and those that need a control plane."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*super().list_commands(context), *FLEET_COMMANDS])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        lazy = FLEET_COMMANDS.get(name)
        return super().get_command(context, name) if lazy is None else lazy.load(f"extract {name}")


def price_of(chips: str, capacity: str) -> float | None:
    """Dollars per hour of one chip of a type such as `v5e-16`; None if no price is known."""
    from tpufleet.model.job.jobs import Capacity
    from tpufleet.model.tpu import prices, topology
    from tpufleet.views.cli import connection

    if capacity not in list(Capacity):
        raise BadInput(f"capacity {capacity!r} is not one of {', '.join(Capacity)}")
    topology.find(chips)  # such as v5e-17 does not exist
    kind = chips.strip().lower().rpartition("-")[0]
    generation = "v5e" if kind == "v5litepod" else kind
    price = prices.price_table(connection.settings().prices).get((generation, capacity))
    return None if price is None else price.usd


extract = FleetGroup(
    name="extract",
    commands=activations_group.commands,
    help=activations_group.help,
    context_settings={**activations_group.context_settings, "obj": price_of},
)
