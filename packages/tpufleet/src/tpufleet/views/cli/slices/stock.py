"""`tpu stock`: capacity granted and refused, by zone."""

from __future__ import annotations

from datetime import datetime

import click

from tpufleet.model.tpu import topology
from tpufleet.model.tpu.topology import short_name
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option


@click.command(
    epilog="\b\nExamples:\n  tpu stock --zone us-central1-a\n  tpu stock --type v5e-16\n"
)
@click.option("--zone", help="Only this zone.")
@click.option("--type", "accelerator", metavar="TYPE", help="Only this TPU type.")
@json_option
def stock(zone: str | None, accelerator: str | None, as_json: bool) -> None:
    """Show what each zone granted and refused, and when it is retried."""
    name = topology.find(accelerator).name if accelerator is not None else None
    with connection.connect() as client:
        report = client.stock()
    rows = [
        row for row in report.rows if zone in (None, row.zone) and name in (None, row.accelerator)
    ]
    if as_json:
        output.print_json({"rows": rows})
        return
    output.print_table(
        ("ZONE", "TYPE", "CAPACITY", "GRANTED", "LAST", "REFUSED", "LAST", "RETRY", "PREEMPTED",
         "MESSAGE"),
        (
            (row.zone, short_name(row.accelerator), row.capacity.value, str(row.granted),
             text.age(row.last_granted, report.now), str(row.refused),
             text.age(row.last_refused, report.now), retry_time(row.not_before, report.now),
             str(row.preempted), row.message)
            for row in rows
        ),
        "no capacity requested yet",
    )  # fmt: skip


def retry_time(not_before: datetime | None, now: datetime) -> str:
    """When a location that refused is retried. A time that has passed: with the next job."""
    if not_before is None:
        return "-"
    return "now" if not_before <= now else text.age(not_before, now)
