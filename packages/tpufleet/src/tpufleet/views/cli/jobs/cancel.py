"""`tpu cancel`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tpufleet.errors import Conflict, Forbidden, NotFound
from tpufleet.model.api_types import JobRow
from tpufleet.model.job.jobs import ENDED_STATES
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option, yes_option
from tpufleet.views.cli.slices.inventory import named_slices

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient


@click.command(epilog="\b\nExamples:\n  tpu cancel train\n  tpu cancel --all --yes\n")
@click.argument("jobs", metavar="JOB|SLICE…", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All of your jobs that have not ended.")
@click.option("--waiting", is_flag=True, help="Only jobs that wait in the queue.")
@yes_option
@json_option
def cancel(jobs: tuple[str, ...], everything: bool, waiting: bool, yes: bool) -> None:
    """Cancel each JOB: SIGTERM, the grace period, SIGKILL; then its slices are released.

    A SLICE, by name or alias, means the job on it.
    A cancelled job keeps its checkpoints; `tpu resume` continues from them.
    """
    output.require_one({"JOB": jobs, "--all": everything})
    with connection.connect() as client:
        queued = {entry.job.id for entry in client.queue()} if waiting else None
        if everything:
            mine = client.all_jobs(owner=client.me().name, state="live")
            jobs = tuple(row.id for row in mine if queued is None or row.id in queued)
            if jobs:
                output.confirm(f"Cancel {text.counted(len(jobs), 'job')}?", yes or output.as_json())
        rows, errors = [], []
        for job in jobs:  # one that cannot be cancelled must not protect the others
            try:
                if queued is not None and (row := client.job(job).row).id not in queued:
                    raise Conflict(
                        f"{row.name} ({row.id}) is {row.state}, and not in the queue; "
                        f"`tpu cancel {row.id}` ends it"
                    )
                rows.append(_cancel(client, job))
            except (NotFound, Conflict, Forbidden) as error:
                errors.append(str(error))
    if output.as_json():
        output.print_json({"jobs": rows})
    for row in rows if not output.as_json() else ():
        verb = "cancelled" if row.state in ENDED_STATES else "cancelling"
        click.echo(f"{verb} {row.name} ({row.id})")
    if errors:
        raise Conflict("\n".join(errors))
    if not rows:
        output.print_nothing_to("cancel", "live jobs")


def _cancel(client: FleetClient, name: str) -> JobRow:
    """By the job, or else by the slice, the node or the alias that it runs on."""
    try:
        return client.cancel(name)
    except NotFound:
        for row in named_slices(client.inventory().rows, name):
            if row.job_id is None:
                raise NotFound(f"no job runs on {name}") from None
            return client.cancel(row.job_id)
        raise
