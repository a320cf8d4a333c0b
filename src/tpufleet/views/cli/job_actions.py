"""`tpu cancel`, `tpu resume`, `tpu rerun`."""

from __future__ import annotations

from typing import Any

import click

from tpufleet.errors import BadInput, Conflict, Forbidden, NotFound
from tpufleet.model.api_types import JobRow
from tpufleet.model.jobs import ENDED_STATES
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option


@click.command(
    short_help="Stop jobs for good.",
    epilog="\b\nExamples:\n  tpu cancel train\n  tpu cancel --all --yes\n",
)
@click.argument("jobs", metavar="JOB…", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every job of yours that has not ended.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
def cancel(jobs: tuple[str, ...], everything: bool, yes: bool, as_json: bool) -> None:
    """Stop each JOB: its program gets SIGTERM and its grace period, then its slices go back.

    A cancelled job keeps its checkpoints; `tpu resume` goes on from them.
    """
    if bool(jobs) == everything:
        raise BadInput("name the jobs to cancel, or say --all, not both")
    with connection.connect() as client:
        if everything:
            jobs = tuple(row.id for row in client.all_jobs(owner=client.me().name, state="live"))
            if jobs:
                output.confirm(f"cancel {text.counted(len(jobs), 'job')}?", yes or as_json)
        rows, refusals = [], []
        for job in jobs:  # one that cannot be cancelled must not save the others
            try:
                rows.append(client.cancel(job))
            except (NotFound, Conflict, Forbidden) as error:
                refusals.append(str(error))
    if as_json:
        output.print_json({"jobs": rows})
    for row in rows if not as_json else ():
        words = "is cancelled" if row.state in ENDED_STATES else "is being cancelled"
        click.echo(f"{row.name} ({row.id}) {words}")
    if refusals:
        raise Conflict("\n".join(refusals))
    if not rows:
        output.print_status("nothing to cancel")


def _again(verb: str, job: str, settings: tuple[str, ...], follow: bool, as_json: bool) -> int:
    from tpufleet.views.cli import job_files, submit

    changes: dict[str, Any] = {}
    with connection.connect() as client:
        if settings:
            # A change inside a mapping (env.LR=1) must keep the mapping's other entries.
            from tpufleet.model import job_file

            plain = job_file.to_document(client.job(job).job.spec)
            changed = job_files.with_overrides(plain, settings)
            job_file.parse_job(changed)
            changes = {name: changed[name] for name in changed if changed[name] != plain.get(name)}
        row: JobRow = getattr(client, verb)(job, changes)
        if follow:
            return submit.follow_jobs(client, (row,), as_json)
    if as_json:
        output.print_json(row)
    else:
        words = "goes on" if verb == "resume" else "runs again"
        click.echo(f"{row.name} {words} as {row.id} (from {row.parent})")
    return 0


_set = output.repeatable("--set", "settings", metavar="PATH=VALUE", help="Change a field.")
_follow = click.option("--follow", "-f", is_flag=True, help="Follow the job until it ends.")


@click.command(
    short_help="Go on from the last checkpoint.",
    epilog="\b\nExamples:\n  tpu resume train --follow\n  tpu resume train --set timeout=48h\n",
)
@click.argument("job")
@_set
@_follow
@json_option
@click.pass_context
def resume(
    context: click.Context, job: str, settings: tuple[str, ...], follow: bool, as_json: bool
) -> None:
    """Go on with an ended JOB from its last checkpoint, with the very same code.

    It becomes a new job, a child of the old one.
    """
    context.exit(_again("resume", job, settings, follow, as_json))


@click.command(
    short_help="Start afresh with the same code.",
    epilog="\b\nExamples:\n  tpu rerun train\n  tpu rerun train --set env.SEED=2 --follow\n",
)
@click.argument("job")
@_set
@_follow
@json_option
@click.pass_context
def rerun(
    context: click.Context, job: str, settings: tuple[str, ...], follow: bool, as_json: bool
) -> None:
    """Run an ended JOB again from the start, with the very same code and no checkpoint.

    It becomes a new job, a child of the old one.
    """
    context.exit(_again("rerun", job, settings, follow, as_json))
