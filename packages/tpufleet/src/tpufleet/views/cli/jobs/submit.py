"""`tpu run` and `tpu submit`: two ways to write the same job file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpufleet import config
from tpufleet.entry_points import registered
from tpufleet.errors import BadInput, Unreachable
from tpufleet.model.api_types import JobRow
from tpufleet.model.fleet.slices import SIMULATED, SIMULATED_PROVIDERS
from tpufleet.model.job import job_file
from tpufleet.model.job.jobs import JobId, JobSpec, JobState
from tpufleet.model.tpu import prices, tpu_zones
from tpufleet.model.tpu.prices import Estimate
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.jobs import job_options
from tpufleet.views.cli.output import json_option
from tpufleet.views.cli.parameter_types import host_option
from tpufleet.views.cli.settings.preferences import use_time_zone

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient
    from tpufleet.client.snapshots import Scan

PROGRAMS = ("python", "python3", "bash", "sh", "uv")
SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")
DETACHED = 130  # exit status after Ctrl-C, as for any interrupted program

_host = host_option("Show the output of this host, or of all.", default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedJob:
    spec: JobSpec
    folder: Path  # that the snapshot is made of
    accelerator: str  # as the user typed it
    document: dict[str, Any]  # the job file
    where: str  # prefix of error messages: the file and the number in it


@click.command(
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
@output.repeatable(
    "--set",
    "settings",
    metavar="PATH=VALUE",
    help="Another field of a job file, such as grace=5m or pod.cpu=8; `tpu submit --help` lists "
    "them.",
)
@output.detach_option
@output.repeatable(
    "--config",
    "-c",
    "config_values",
    metavar="KEY=VALUE",
    help="Append --PATH=VALUE to CMD, where KEY is a path or an alias of one (`tpu config alias`).",
)
@click.option("--dir", "folder", metavar="N", help="Your folder N (`tpu config dir`).")
@_host
@output.dry_run_option
@json_option
@click.pass_context
def run(
    context: click.Context,
    accelerator: str,
    command: tuple[str, ...],
    settings: tuple[str, ...],
    detach: bool,
    config_values: tuple[str, ...],
    folder: str | None,
    host: int | None,
    dry_run: bool,
    **options: Any,
) -> None:
    """Run CMD on every host of a slice of TYPE, and follow it: events, logs, progress.

    Only the output of host 0 is shown, since most programs print the same on every host; --host all
    shows every host's, and `tpu logs` has them all.

    The current folder is copied to every host, except what .gitignore and .tpuignore match. Ctrl-C
    detaches; the job continues. The exit status is 0 if the job succeeded, 1 if it failed, 130 if
    you detached. If no server is configured, one is started on this machine. `tpu types` lists the
    types.
    """
    from tpufleet.views.cli.jobs import job_files, run_aliases

    if accelerator in PROGRAMS or Path(accelerator).suffix in job_files.PROGRAMS:
        typed = shlex.join((accelerator, *command))
        raise job_files.is_program(accelerator, typed)
    target = run_aliases.resolve(accelerator, command, config_values, folder)
    if target.pool and not options.get("pool"):
        options["pool"] = target.pool
    document = job_options.plain_from(
        target.accelerator, target.command, job_options.capacity_of(context), options
    )
    document = job_files.with_overrides(document, settings)
    base = target.workdir or Path.cwd()
    if options.get("notes") is None:
        code = base / Path(str(document.get("workdir", "."))).expanduser()
        for find_notes in registered("tpufleet.notes"):  # of other distributions
            if (found := find_notes(code)) is not None:
                document["notes"], file = found
                output.print_status(f"notes: from {file}; --note replaces them")
    planned = [_plan(document, base, "")]
    _submit(
        context,
        planned,
        follow=False if detach else None,
        host=host,
        dry_run=dry_run,
    )


class _CommandWithFields(click.Command):
    """Its help also lists the fields of a job file."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(context, formatter)
        with formatter.section("Fields of a job file"):
            formatter.write_dl([(f.name, job_options.summary(f)) for f in job_file.FIELDS])


@click.command(
    cls=_CommandWithFields,
    epilog="""\b
Examples:
  tpu submit job.yaml
  tpu submit job.yaml --set env.LR=0.1 --set slices=2 --follow
  generate-jobs | tpu submit -
""",
)
@click.argument("files", metavar="FILE…", nargs=-1, required=True)
@output.repeatable("--set", "settings", metavar="PATH=VALUE", help="Override a field of all jobs.")
@click.option("--follow", "-f", is_flag=True, help="Follow the jobs until they end.")
@_host
@output.dry_run_option
@json_option
@click.pass_context
def submit(
    context: click.Context,
    files: tuple[str, ...],
    settings: tuple[str, ...],
    follow: bool,
    host: int | None,
    dry_run: bool,
) -> None:
    """Submit every job in the FILEs (YAML or JSON; `-` is standard input; `---` separates jobs).

    Either all jobs are submitted or, if one is invalid, none. Each error names the field and a
    correction.
    """
    from tpufleet.views.cli.jobs import job_files

    planned, errors = [], []
    for file in files:
        documents = job_files.read(file)
        for number, (document, folder) in enumerate(documents, start=1):
            where = f"{file}: " if len(documents) == 1 else f"{file} (job {number}): "
            try:
                planned.append(_plan(job_files.with_overrides(document, settings), folder, where))
            except BadInput as error:
                errors.append(str(error))
    if errors:
        raise BadInput("\n".join(errors))
    _submit(context, planned, follow=follow, host=host, dry_run=dry_run)


def _plan(document: dict[str, Any], folder: Path, where: str) -> PlannedJob:
    try:
        spec = job_file.parse_job(document)
    except BadInput as error:
        raise BadInput("\n".join(where + line for line in str(error).splitlines())) from error
    return PlannedJob(
        spec=spec,
        folder=(folder / Path(spec.workdir).expanduser()).resolve(),
        accelerator=str(document["accelerator"]),
        document=document,
        where=where,
    )


def _submit(
    context: click.Context,
    planned: list[PlannedJob],
    *,
    follow: bool | None,  # None: as the user has set
    host: int | None,
    dry_run: bool,
) -> None:
    from tpufleet.client import snapshots
    from tpufleet.client.fleet import new_job, new_job_id

    for job in planned:
        for zone in job.spec.zones:
            if near := tpu_zones.misspelt(zone):
                output.print_status(
                    f"warning: {job.where}no zone {zone} is known; did you mean {near}?"
                )
        if names := literal_variables(job.spec.command):
            output.print_status(
                f"warning: {job.where}no shell replaces {', '.join(names)}: the program gets the "
                "text as it is\n  next: pass the command as one argument, a script: "
                f"-- '{shlex.join(job.spec.command[:1])} … {names[0]}'"
            )
    limit = connection.settings().snapshot_limit
    scans = {folder: snapshots.scan(folder, limit) for folder in {job.folder for job in planned}}
    if dry_run:
        _show_plan(planned, scans)
        return
    with connection.connect(start=True) as client:
        for scanned in scans.values():
            snapshots.upload(client, scanned)
        new_jobs = [
            new_job(
                {**job.document, "workdir": str(job.folder)},  # what `.` meant
                job.spec,
                new_job_id(),
                scans[job.folder].digest,
            )
            for job in planned
        ]
        try:
            rows = client.submit(new_jobs)
        except BadInput as error:
            raise BadInput(_located(str(error), planned)) from error
        if not output.as_json():
            _show_estimate(planned, rows)
        accelerators = [job.accelerator for job in planned]
        if follow is None:
            follow = bool(client.preferences().setting("monitor_after_run"))
        if not follow:
            _show_submitted(rows, accelerators)
            return
        context.exit(follow_jobs(client, rows, accelerators, host=host))


def literal_variables(command: Sequence[str]) -> list[str]:
    """`$NAME` and `${NAME}` in arguments, unless one of them is a shell that gets a script."""
    shells = [at for at, word in enumerate(command) if word.rpartition("/")[2] in SHELLS]
    if any(re.fullmatch(r"-\w*c\w*", word) for at in shells for word in command[at + 1 :]):
        return []
    return list(dict.fromkeys(found[0] for word in command for found in _VARIABLE.finditer(word)))


def _located(message: str, planned: list[PlannedJob]) -> str:
    """With the file of a job instead of its position in the request."""
    return re.sub(
        r"^jobs\[(\d+)\]\.", lambda found: planned[int(found[1])].where, message, flags=re.MULTILINE
    )


def follow_jobs(
    client: FleetClient,
    rows: tuple[JobRow, ...],
    accelerators: Sequence[str] | None = None,
    announce: bool = True,
    *,
    host: int | None = 0,
) -> int:
    """The exit status. Ctrl-C detaches; the jobs continue. `host` None shows the logs of all."""
    from tpufleet.views.cli.jobs import follow, follow_display

    ids = [row.id for row in rows]
    if announce and not output.as_json():
        _show_submitted(rows, accelerators)
    if not output.as_json():
        use_time_zone(client)
    try:
        ended = follow.follow(client, ids, follow_display.screen(), logs=len(ids) == 1, host=host)
    except KeyboardInterrupt:
        output.print_status(_detach_message(ids))
        return DETACHED
    if not output.as_json():
        for row in ended.values():
            _show_end(row)
    return follow.exit_status(ended)


def _show_submitted(rows: tuple[JobRow, ...], accelerators: Sequence[str] | None) -> None:
    if output.printed_json({"jobs": rows}):
        return
    for row, accelerator in zip(
        rows, accelerators or [short_name(row.accelerator) for row in rows], strict=True
    ):
        note = f" ({row.reason})" if row.reason != "submitted" else ""
        output.print_submitted(row, accelerator, note)


def _show_estimate(planned: list[PlannedJob], rows: tuple[JobRow, ...]) -> None:
    """What the jobs cost while they run, on standard error. Simulated slices cost nothing."""
    if all(row.simulated for row in rows):
        return
    table = prices.price_table(connection.settings().prices)
    estimates = [prices.estimate(job.spec, table) for job in planned]
    if len(estimates) == 1:
        output.print_status(estimate_text(estimates[0]))
        return
    known = [each.usd_per_hour for each in estimates if each.usd_per_hour is not None]
    unlimited = [each for each in estimates if each.usd_per_hour is None and each.limit is not None]
    for each in unlimited[:1]:
        output.print_status(estimate_text(each))
    if known:
        output.print_status(
            f"estimate: ${sum(known):,.2f} per hour while all {len(estimates)} jobs run"
        )


def estimate_text(estimate: Estimate) -> str:
    if estimate.usd_per_hour is None:
        lost = ": without it `max_cost` has no effect" if estimate.limit is not None else ""
        return (
            f"estimate: no price is known for this type; {estimate.chips} chips. "
            f"Set it as `prices` in the config file of the server{lost}"
        )
    limit = f", at most ${prices.amount(estimate.limit)}" if estimate.limit is not None else ""
    as_of = f", {estimate.as_of}" if estimate.as_of else ""
    return (
        f"estimate: ${prices.amount(estimate.usd_per_hour)} per hour while it runs{limit} "
        f"({text.counted(estimate.chips, 'chip')}, {estimate.capacity}; price: "
        f"{estimate.source}{as_of})"
    )


def _show_end(row: JobRow) -> None:
    summary = f"{row.name} {row.state} after {text.counted(row.attempts, 'attempt')}: "
    output.print_line(summary + text.one_line(row.reason), text.colour(row.state))
    if row.state is not JobState.SUCCEEDED:
        again = (
            f"`tpu resume {row.id}` continues from the last checkpoint (--new-code: with the code "
            "in this folder)"
            if row.attempts
            else f"`tpu rerun {row.id}` submits it again"
        )
        output.print_status(f"  next: `tpu why {row.id}` explains it, {again}")


def _detach_message(ids: list[JobId]) -> str:
    continues = "the job continues" if len(ids) == 1 else "the jobs continue"
    return (
        f"\ndetached; {continues}\n"
        f"  next: `tpu logs -f {ids[0]}` follows it, `tpu cancel {ids[0]}` cancels it"
    )


def _check_by_server(planned: list[PlannedJob]) -> list[bool] | None:
    """Which jobs would be simulated; None if there is no server, since none is started for it."""
    from tpufleet.client.fleet import new_job, new_job_id

    settings = connection.settings()
    if not connection.is_remote() and config.embedded_server_url(settings.home) is None:
        return None
    jobs = [new_job(job.document, job.spec, new_job_id(), None) for job in planned]
    try:
        with connection.connect() as client:
            return [row.simulated for row in client.check_jobs(jobs)]
    except BadInput as error:
        raise BadInput(_located(str(error), planned)) from error
    except Unreachable as error:
        output.print_status(f"not checked by the server: {text.one_line(str(error))}")
        return None


def _is_simulated(spec: JobSpec) -> bool:
    """As far as is known without a server."""
    settings = connection.settings()
    if spec.providers:
        return set(spec.providers) <= SIMULATED_PROVIDERS
    try:
        return not connection.is_remote() and settings.default_provider in SIMULATED_PROVIDERS
    except BadInput:  # no provider is enabled
        return False


def _show_plan(planned: list[PlannedJob], scans: dict[Path, Scan]) -> None:
    table = prices.price_table(connection.settings().prices)
    simulations = _check_by_server(planned) or [_is_simulated(job.spec) for job in planned]
    jobs = [
        {
            "spec": job_file.to_document(job.spec),
            "snapshot": scans[job.folder].digest,
            "files": len(scans[job.folder].entries),
            "bytes": scans[job.folder].size,
            "estimate": prices.estimate(job.spec, table),
            "simulated": simulated,
        }
        for job, simulated in zip(planned, simulations, strict=True)
    ]
    if output.printed_json({"jobs": jobs}):
        return
    import yaml

    for job, simulated in zip(planned, simulations, strict=True):
        scan = scans[job.folder]
        written = yaml.safe_dump(
            job_file.to_document(job.spec), sort_keys=False, allow_unicode=True
        )
        click.echo(f"---\n{written}", nl=False)
        click.echo(
            f"# {text.counted(len(scan.entries), 'file')} in {job.folder}, {text.size(scan.size)}"
        )
        estimate = prices.estimate(job.spec, table)
        free = f"{SIMULATED} ({text.counted(estimate.chips, 'chip')}): nothing is billed"
        click.echo(f"# {free if simulated else estimate_text(estimate)}")
    output.print_status(f"dry run: {text.counted(len(jobs), 'job')} valid, none submitted")
