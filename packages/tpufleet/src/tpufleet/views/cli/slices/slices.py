"""`tpu slices`: the slices of the fleet."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from tpufleet.model.tpu.topology import short_name
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option


@click.command(epilog="\b\nExamples:\n  tpu slices\n  tpu slices --json\n")
@json_option
def slices(as_json: bool) -> None:
    """List every slice that exists or is requested, and its job."""
    with connection.connect() as client:
        rows = client.slices()
    if as_json:
        output.print_json({"slices": rows})
        return
    now = datetime.now(UTC)
    output.print_table(
        ("SLICE", "STATE", "TYPE", "ZONE", "CAPACITY", "HOSTS", "POOL", "JOB", "REQUESTED",
         "REASON"),
        (
            (row.id, (row.state.value, text.colour(row.state)), short_name(row.accelerator),
             row.zone, row.capacity.value, f"{row.hosts_seen}/{row.hosts}", row.pool or "-",
             row.job_id or "-", text.age(row.requested_at, now), row.reason)
            for row in rows
        ),
        "no slices; jobs request them, or keep some ready with `tpu pool create --smallest N`",
        droppable=("REQUESTED", "CAPACITY", "HOSTS", "POOL", "JOB"),
    )  # fmt: skip
