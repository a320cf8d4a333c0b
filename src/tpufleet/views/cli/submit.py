"""`tpu run` and `tpu submit`: two ways to write the same job file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpufleet.errors import BadInput
from tpufleet.model import job_file
from tpufleet.model.api_types import JobRow, NewJob
from tpufleet.model.jobs import JobId, JobSpec
from tpufleet.views import text
from tpufleet.views.cli import connection, job_options, output
from tpufleet.views.cli.output import json_option

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient

Planned = tuple[JobSpec, Path]  # the spec, and the folder that its snapshot is made of

DETACHED = 130


@click.command(
    short_help="Run a command on a TPU slice and follow it.",
    epilog="""\b
Examples:
  tpu run v5e-16 -- python train.py lr=0.01
  tpu run v5e-16 --spot --on-demand --zone us-central1-a --zone europe-west4-b -- ./train.sh
  tpu run v4-32 --slices 2 --retries failure=2 --detach -- python train.py
""",
)
@click.argument("accelerator", metavar="TYPE")
@click.argument("command", metavar="-- CMD…", nargs=-1, type=click.UNPROCESSED, required=True)
@job_options.spec_options
@click.option("--detach", "-d", is_flag=True, help="Submit, say the id, and leave.")
@click.option("--dry-run", is_flag=True, help="Check everything, submit nothing.")
@json_option
@click.pass_context
def run(
    context: click.Context,
    accelerator: str,
    command: tuple[str, ...],
    detach: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run CMD on every host of a slice of TYPE, and follow it: events, logs, progress.

    This folder is copied to every host (less what .gitignore and .tpuignore name). Ctrl-C leaves;
    the job goes on. The exit status is the job's: 0 succeeded, 1 failed, 130 you left.
    With no server configured, one is started on this machine. `tpu types` lists the types.
    """
    plain = job_options.plain_from(accelerator, command, job_options.capacity_of(context), options)
    planned = [_plan(plain, Path.cwd(), "")]
    _go(context, planned, follow=not detach, dry_run=dry_run, as_json=as_json)


class _WithFields(click.Command):
    """Its help also tells what a job file may hold."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(context, formatter)
        with formatter.section("Fields of a job file"):
            formatter.write_dl([(field.name, field.summary) for field in job_file.FIELDS])


@click.command(
    cls=_WithFields,
    short_help="Submit the jobs in a file.",
    epilog="""\b
Examples:
  tpu submit job.yaml
  tpu submit job.yaml --set env.LR=0.1 --set slices=2 --follow
  generate-jobs | tpu submit -
""",
)
@click.argument("files", metavar="FILE…", nargs=-1, required=True)
@output.repeatable("--set", "settings", metavar="PATH=VALUE", help="Change a field of every job.")
@click.option("--follow", "-f", is_flag=True, help="Follow the jobs until they end.")
@click.option("--dry-run", is_flag=True, help="Check everything, submit nothing.")
@json_option
@click.pass_context
def submit(
    context: click.Context,
    files: tuple[str, ...],
    settings: tuple[str, ...],
    follow: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Submit every job in the FILEs (YAML or JSON; `-` is standard input; `---` between jobs).

    All of them or, when one has a fault, none. Each fault is told with its field and its cure.
    """
    from tpufleet.views.cli import job_files

    planned, faults = [], []
    for file in files:
        documents = job_files.read(file)
        for number, (plain, folder) in enumerate(documents, start=1):
            where = f"{file}: " if len(documents) == 1 else f"{file} (job {number}): "
            try:
                planned.append(_plan(job_files.with_overrides(plain, settings), folder, where))
            except BadInput as error:
                faults.append(str(error))
    if faults:
        raise BadInput("\n".join(faults))
    _go(context, planned, follow=follow, dry_run=dry_run, as_json=as_json)


def _plan(plain: dict[str, Any], folder: Path, where: str) -> Planned:
    try:
        spec = job_file.parse_job(plain)
    except BadInput as error:
        raise BadInput("\n".join(where + line for line in str(error).splitlines())) from error
    return spec, (folder / Path(spec.workdir).expanduser()).resolve()


def _go(
    context: click.Context, planned: list[Planned], *, follow: bool, dry_run: bool, as_json: bool
) -> None:
    from tpufleet.client import snapshots
    from tpufleet.client.fleet import new_job_id

    limit = connection.settings().snapshot_limit
    scans = {folder: snapshots.scan(folder, limit) for folder in {folder for _, folder in planned}}
    if dry_run:
        _show_plan(planned, scans, as_json)
        return
    with connection.connect(start=True) as client:
        for scanned in scans.values():
            upload(client, scanned)
        rows = client.submit(
            [
                NewJob(
                    id=new_job_id(), spec=job_file.to_document(spec), snapshot=scans[folder].digest
                )
                for spec, folder in planned
            ]
        )
        if not follow:
            _show_submitted(rows, as_json)
            return
        context.exit(follow_jobs(client, rows, as_json))


def upload(client: FleetClient, scanned: Any) -> None:
    from tpufleet.client import snapshots

    if client.has_snapshot(scanned.digest):
        return
    with tempfile.TemporaryFile() as packed:
        snapshots.pack(scanned, packed)
        packed.seek(0)
        client.put_snapshot(scanned.digest, packed)


def follow_jobs(client: FleetClient, rows: tuple[JobRow, ...], as_json: bool) -> int:
    """The exit status. Ctrl-C leaves the jobs running, and says so."""
    from tpufleet.views.cli import follow, follow_display

    ids = [row.id for row in rows]
    if not as_json:
        _show_submitted(rows, as_json)
    try:
        ended = follow.follow(client, ids, follow_display.screen_for(as_json), logs=len(ids) == 1)
    except KeyboardInterrupt:
        output.print_status(_left(ids))
        return DETACHED
    if not as_json:
        for row in ended.values():
            _show_end(row)
    return follow.exit_status(ended)


def _show_submitted(rows: tuple[JobRow, ...], as_json: bool) -> None:
    if as_json:
        output.print_json({"jobs": rows})
        return
    for row in rows:
        click.echo(f"submitted {row.name} as {row.id} on {row.slices} × {row.accelerator}")


def _show_end(row: JobRow) -> None:
    words = f"{row.name} {row.state} after {text.counted(row.attempts, 'attempt')}: "
    output.print_line(words + text.one_line(row.reason), text.colour(row.state))
    if row.state != "succeeded":
        output.print_status(f"`tpu why {row.id}` says more; `tpu resume {row.id}` goes on from its "
                   "last checkpoint")  # fmt: skip


def _left(ids: list[JobId]) -> str:
    these = "the job goes on" if len(ids) == 1 else "the jobs go on"
    return f"\nyou left; {these}. `tpu logs -f {ids[0]}` follows it, `tpu cancel {ids[0]}` stops it"


def _show_plan(planned: list[Planned], scans: dict[Path, Any], as_json: bool) -> None:
    jobs = [
        {
            "spec": job_file.to_document(spec),
            "snapshot": scans[folder].digest,
            "files": len(scans[folder].entries),
            "bytes": scans[folder].size,
        }
        for spec, folder in planned
    ]
    if as_json:
        output.print_json({"jobs": jobs})
        return
    import yaml

    for job, (_, folder) in zip(jobs, planned, strict=True):
        written = yaml.safe_dump(job["spec"], sort_keys=False, allow_unicode=True)
        click.echo(f"---\n{written}", nl=False)
        click.echo(f"# {text.counted(job['files'], 'file')} of {folder}, {job['bytes']} bytes")
    output.print_status(f"{text.counted(len(jobs), 'job')} would be submitted; nothing was")
