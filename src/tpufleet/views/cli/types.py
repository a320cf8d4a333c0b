"""`tpu types`: the TPU types."""

from __future__ import annotations

import click

from tpufleet.model import topology
from tpufleet.views.cli import output
from tpufleet.views.cli.output import json_option


@click.command(epilog="\b\nExamples:\n  tpu types v5e\n  tpu types --json\n")
@click.argument("generation", required=False)
@json_option
def types(generation: str | None, as_json: bool) -> None:
    """List TPU types, their chips and hosts; optionally of one GENERATION (v4, v5e, v5p, v6e, …).

    Needs no server.
    """
    every = topology.all_types().values()
    chosen = [
        kind
        for kind in every
        if generation is None or generation.lower() in (kind.generation, kind.name.split("-")[0])
    ]
    if as_json:
        output.print_json({"types": chosen})
        return
    aliases: dict[str, list[str]] = {}
    for spelling, name in topology.spellings().items():
        if spelling != name:
            aliases.setdefault(name, []).append(spelling)
    output.print_table(
        ("TYPE", "ALIAS", "CHIPS", "HOSTS", "CHIPS/HOST", "TOPOLOGY", "GKE MACHINE"),
        (
            (kind.name, ", ".join(aliases.get(kind.name, [])) or "-", str(kind.chips),
             str(kind.hosts), str(kind.chips_per_host), kind.topology, kind.machine_type or "-")
            for kind in chosen
        ),
        f"unknown generation {generation!r}; known: "
        + ", ".join(sorted({kind.generation for kind in every})),
    )  # fmt: skip
