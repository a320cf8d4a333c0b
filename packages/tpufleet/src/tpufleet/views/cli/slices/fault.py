"""`tpu fault`: inject a fault into a simulated slice."""

from __future__ import annotations

import click

from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option
from tpufleet.views.cli.slices.host_commands import find_slice

# The faults of the local provider; the server validates them.
FAULTS = ("preempt", "preempt-notice", "maintenance", "kill-host", "stall-host")
HOST_FAULTS = ("kill-host", "stall-host")


@click.command(
    epilog="\b\nExamples:\n  tpu fault train preempt\n  tpu fault train-1 kill-host --host 2\n",
)
@click.argument("target", metavar="JOB|SLICE")
@click.argument("kind", metavar="KIND", type=click.Choice(FAULTS))
@click.option("--host", type=click.IntRange(min=0), help="Host, for a fault of one host (0).")
@json_option
def fault(target: str, kind: str, host: int | None, as_json: bool) -> None:
    """Inject a fault of KIND into a slice, or that of a JOB, to test recovery. Simulated slices
    only. Requires that the job is yours, or the admin role.

    \b
    preempt         remove the slice without notice
    preempt-notice  preemption notice, then remove the slice
    maintenance     maintenance notice, then remove the slice
    kill-host       kill one host
    stall-host      one host stops responding without dying
    """
    if kind in HOST_FAULTS and host is None:
        host = 0
    with connection.connect() as client:
        slice_id = find_slice(client, target).id
        client.inject_fault(slice_id, kind, host=host)
    output.print_result(
        {"slice": slice_id, "fault": kind, "host": host},
        f"injected {kind} into {slice_id}; follow with `tpu events -f`",
        as_json,
    )
