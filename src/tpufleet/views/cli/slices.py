"""`tpu slices`, `tpu types`, `tpu fault`: the hardware."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from tpufleet.model import topology
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option

# What a provider that can be drilled understands; the server has the last word.
FAULTS = ("preempt", "preempt-notice", "maintenance", "kill-host", "stall-host")
ON_A_HOST = ("kill-host", "stall-host")


@click.command(short_help="List the slices that we hold.", epilog="\b\nExample:\n  tpu slices\n")
@json_option
def slices(as_json: bool) -> None:
    """List every slice that is held or asked for, and which job it works for."""
    with connection.connect() as client:
        held = client.slices()
    if as_json:
        output.print_json({"slices": held})
        return
    now = datetime.now(UTC)
    output.print_table(
        ("SLICE", "STATE", "TYPE", "ZONE", "CAPACITY", "HOSTS", "POOL", "JOB", "ASKED FOR",
         "REASON"),
        (
            (row.id, (row.state.value, text.colour(row.state)), row.accelerator, row.zone,
             row.capacity.value, f"{row.hosts_seen}/{row.hosts}", row.pool or "-",
             row.job_id or "-", text.age(row.requested_at, now), row.reason)
            for row in held
        ),
        "no slices; they come with jobs, or with `tpu pool create --smallest N`",
    )  # fmt: skip


@click.command(
    short_help="List the TPU types.",
    epilog="\b\nExamples:\n  tpu types v5e\n  tpu types --json\n",
)
@click.argument("generation", required=False)
@json_option
def types(generation: str | None, as_json: bool) -> None:
    """List the types of slice (of one GENERATION: v4, v5e, v5p, v6e, …), chips and hosts of each.

    Needs no server.
    """
    found = [
        kind
        for kind in topology.all_types().values()
        if generation is None or generation.lower() in (kind.generation, kind.name.split("-")[0])
    ]
    spelled: dict[str, list[str]] = {}
    for spelling, name in topology.spellings().items():
        if spelling != name:
            spelled.setdefault(name, []).append(spelling)
    if as_json:
        output.print_json({"types": found})
        return
    output.print_table(
        ("TYPE", "ALSO", "CHIPS", "HOSTS", "CHIPS A HOST", "TOPOLOGY", "GKE MACHINE"),
        (
            (kind.name, ", ".join(spelled.get(kind.name, [])) or "-", str(kind.chips),
             str(kind.hosts), str(kind.chips_per_host), kind.topology, kind.machine_type or "-")
            for kind in found
        ),
        f"no generation is called {generation}; there are "
        + ", ".join(sorted({kind.generation for kind in topology.all_types().values()})),
    )  # fmt: skip


@click.command(
    short_help="Hurt a slice on purpose, as a drill.",
    epilog="\b\nExamples:\n  tpu fault train-1 preempt\n  tpu fault train-1 kill-host --host 2\n",
)
@click.argument("slice_id", metavar="SLICE")
@click.argument("kind", metavar="KIND", type=click.Choice(FAULTS))
@click.option("--host", type=click.IntRange(min=0), help="Which one, for a fault of one host (0).")
@json_option
def fault(slice_id: str, kind: str, host: int | None, as_json: bool) -> None:
    """Do KIND to SLICE, to see that jobs survive it. Only admins, only simulated slices.

    \b
    preempt         take it away without notice
    preempt-notice  give notice, then take it away
    maintenance     give notice of maintenance, then take it away
    kill-host       kill one host
    stall-host      let one host fall silent without dying
    """
    if kind in ON_A_HOST and host is None:
        host = 0
    with connection.connect() as client:
        client.inject_fault(slice_id, kind, host=host)
    if as_json:
        output.print_json({"slice": slice_id, "fault": kind, "host": host})
    else:
        click.echo(f"asked for {kind} of {slice_id}; `tpu events -f` shows what follows")
