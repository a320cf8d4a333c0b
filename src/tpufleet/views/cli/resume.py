"""`tpu resume` and `tpu rerun`: a new job from an ended one."""

from __future__ import annotations

from typing import Any, Literal

import click

from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import follow_option, json_option

_set = output.repeatable("--set", "settings", metavar="PATH=VALUE", help="Override a field.")


@click.command(
    epilog="\b\nExamples:\n  tpu resume train --follow\n  tpu resume train --set timeout=48h\n",
)
@click.argument("job")
@_set
@follow_option
@json_option
@click.pass_context
def resume(
    context: click.Context, job: str, settings: tuple[str, ...], follow: bool, as_json: bool
) -> None:
    """Continue an ended JOB from its last checkpoint, with the same code.

    This creates a new job whose parent is the old one.
    """
    context.exit(_resubmit("resume", job, settings, follow, as_json))


@click.command(
    epilog="\b\nExamples:\n  tpu rerun train\n  tpu rerun train --set env.SEED=2 --follow\n",
)
@click.argument("job")
@_set
@follow_option
@json_option
@click.pass_context
def rerun(
    context: click.Context, job: str, settings: tuple[str, ...], follow: bool, as_json: bool
) -> None:
    """Run an ended JOB again from the beginning, with the same code and no checkpoint.

    This creates a new job whose parent is the old one.
    """
    context.exit(_resubmit("rerun", job, settings, follow, as_json))


def _resubmit(
    action: Literal["resume", "rerun"],
    job: str,
    settings: tuple[str, ...],
    follow: bool,
    as_json: bool,
) -> int:
    from tpufleet.views.cli import job_files, submit

    changes: dict[str, Any] = {}
    with connection.connect() as client:
        if settings:
            # A change inside a mapping (env.LR=1) must keep the mapping's other entries.
            from tpufleet.model import job_file

            before = job_file.to_document(client.job(job).job.spec)
            after = job_files.with_overrides(before, settings)
            job_file.parse_job(after)
            changes = {name: after[name] for name in after if after[name] != before.get(name)}
        send = client.resume if action == "resume" else client.rerun
        row = send(job, changes)
        if follow:
            return submit.follow_jobs(client, (row,), as_json)
    if as_json:
        output.print_json(row)
    else:
        how = "resumed" if action == "resume" else "rerunning"
        click.echo(f"{how} {row.name} as {row.id} (parent {row.parent})")
    return 0
