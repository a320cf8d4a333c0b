"""Options that commands for TPU VMs share, and the API connection that they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from tpufleet.errors import BadInput, FleetError
from tpufleet.model.fleet import fleets
from tpufleet.model.fleet.fleets import NodeInfo, NodeRequest
from tpufleet.model.tpu import type_lookup
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.gcloud import NodeAddress
from tpufleet.views.cli.output import options
from tpufleet.views.cli.parameter_types import Duration
from tpufleet.views.cli.registry import shared_option

if TYPE_CHECKING:
    from tpufleet.compose.providers import ManualNodes

FLEET_TYPE = "v3-8"
# A request that nobody waits for any more must not be granted: eight hours.
TRIES, DELAY = 1_000, 30.0  # seconds
AUTOSTOP = "24h"  # a TPU VM that nobody looks at ends


class AutostopTime(Duration):
    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> Any:
        return None if value == "none" else super().convert(value, parameter, context)


RETRY_OPTIONS = options(
    click.option("--max-retries", "--max_retries", "tries", type=click.IntRange(min=1),
                 default=TRIES, show_default=True, help="Maximum number of tries."),
    click.option("--retry-delay", "--retry_delay", "delay", type=click.FloatRange(min=0),
                 default=DELAY, show_default=True, help="Seconds between two tries."),
)  # fmt: skip
NODE_OPTIONS = options(
    click.option("--type", "--tpu_type", "accelerator", metavar="TYPE",
                 help="TPU type (default: that in its name, or v3-8 for a fleet)."),
    click.option("--runtime", default="", help="Runtime version (default: by generation)."),
    click.option("--preemptible/--no-preemptible", "--spot/--norm", "-pre/-norm", "spot",
                 default=True, help="Spot capacity (default), or on demand."),
    click.option("--autostop", type=AutostopTime(), default=AUTOSTOP, show_default=True,
                 help="A server or `tpu vm fleet autostop` deletes it after this time; or `none`."),
)  # fmt: skip


def open_nodes() -> ManualNodes:
    """The TPU VMs of the project of `tpu vm --project`, or of the configured one."""
    from tpufleet.compose.providers import manual_nodes

    return manual_nodes(connection.settings(), shared_option("project"), output.print_status)


def zone_of(name: str) -> str:
    """The zone of a node: by option, by name, or the only one of the configuration. Rejects
    invalid names and zones before any call."""
    member = fleets.parse_member(fleets.check_name(name))
    if (zone := shared_option("zone")) is not None:
        return fleets.check_zone(zone)
    if member is not None:
        return member.zone
    if len(zones := open_nodes().zones) == 1:
        return zones[0]
    raise BadInput(f"--zone is required: the name {name!r} does not contain a zone")


def node_address(nodes: ManualNodes, name: str) -> NodeAddress:
    """Of a node that a command connects to with ssh."""
    return NodeAddress(name=name, zone=zone_of(name), project=nodes.project)


def ready_node(nodes: ManualNodes, name: str) -> NodeInfo:
    node = nodes.get(zone_of(name), name)
    if node.state != "READY":
        raise FleetError(
            f"{name} is {fleets.display_state(node.state)}, not ready\n  next: tpu vm status {name}"
        )
    return node


def node_request(
    accelerator: str, spot: bool, runtime: str, autostop: timedelta | None = None
) -> NodeRequest:
    """Rejects unknown types before any call."""
    kind = type_lookup.find(accelerator)
    return NodeRequest(accelerator=kind.name, spot=spot, runtime=runtime, autostop=autostop)


def node_request_from(
    context: click.Context, name: str, values: dict[str, Any], before: NodeInfo | None = None
) -> NodeRequest:
    """The given options; for the others, the configuration of the existing node, or what its name
    says. Nothing is bought by default: a type that is known from neither is an error."""
    explicit = {
        option for option in values
        if context.get_parameter_source(option) is not click.core.ParameterSource.DEFAULT
    }  # fmt: skip
    accelerator, spot, runtime = values["accelerator"], values["spot"], values["runtime"]
    autostop = values["autostop"]
    if before is not None and before.accelerator:
        same = before.same_again()
        accelerator = accelerator or same.accelerator
        spot = spot if "spot" in explicit else same.spot
        runtime = runtime if explicit & {"runtime", "accelerator"} else same.runtime
        autostop = autostop if "autostop" in explicit else same.autostop
    else:
        named = fleets.described_by(name)
        accelerator = accelerator or named.accelerator
        if accelerator is None:
            raise BadInput(f"--type is required: the name {name!r} does not contain a TPU type")
        if "spot" not in explicit and named.spot is not None:
            spot = named.spot
        elif "spot" not in explicit and named.accelerator:
            raise BadInput(
                f"pass --spot or --norm: the name {name!r} says neither spot nor preemptible"
            )
    return node_request(accelerator, spot, runtime, autostop)


@contextmanager
def interruptible(hint: str) -> Iterator[None]:
    """Ctrl-C stops waiting, but not operations of the cloud: the hint says what to do."""
    try:
        yield
    except KeyboardInterrupt:
        output.print_status(f"interrupted; {hint}")
        raise


def undo_hint(name: str, zone: str) -> str:
    return f"the node may still be created; `tpu vm delete {name} --zone {zone}` deletes it"
