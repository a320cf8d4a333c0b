"""`tpu extract deploy` and `board`: run extraction as jobs, and show them."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tpufleet.model.api_types import NewJob
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.job import job_file
from tpufleet.model.job.jobs import Capacity, JobSpec
from tpufleet.model.tpu import type_lookup
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.jobs.submit import DETACHED
from tpufleet_activations import fleet, plans
from tpufleet_activations.cli.parameter_types import SECONDS, json_option, watch_option
from tpufleet_activations.formatting import example_epilog, extract_command, format_health
from tpufleet_activations.io.addresses import open_storage

# What workers install, on hosts that have nothing. Written by scripts/lock. A file of the submitted
# folder, because hosts with our Python need none.
REQUIREMENTS = Path(__file__).with_name("worker_requirements.txt")
TITLES = ("TPU NAME", "STATUS", "SAMPLES", "SHARDS", "GCS")


@click.command(
    epilog=example_epilog(
        "tpu extract deploy gs://lab/acts --zones us-central1-a,europe-west4-b --workers-per-zone 8"
    )
)
@click.argument("out")
@click.argument("run_options", metavar="[-- RUN OPTIONS…]", nargs=-1, type=click.UNPROCESSED)
@click.option("--zones", required=True, help="Comma-separated zones.")
@click.option(
    "--workers-per-zone",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Jobs per zone.",
)
@click.option("--tpu-type", default="v5litepod-8", show_default=True, help="Type of each worker.")
@output.repeatable(
    "--capacity", default=["spot"], type=click.Choice([kind.value for kind in Capacity])
)
@click.option("--pool", help="Run on slices of this pool.")
@click.option("--create-tpus", is_flag=True, help="First create a pool for all workers.")
@click.option("--provider", default="tpu-vm", show_default=True, help="Provider of that pool.")
@click.option("--dry-run", is_flag=True, help="Print the jobs as a job file, submit nothing.")
@click.option("--monitor", is_flag=True, help="Then show the fleet until it is done.")
@click.option(
    "--monitor-interval",
    type=SECONDS,
    default=60.0,
    show_default=True,
    help="Seconds between two updates.",
)
@json_option
@click.pass_context
def deploy(context: click.Context, out: str, run_options: tuple[str, ...], **options: Any) -> None:
    """Run a fleet of workers on the dataset in OUT, which has a plan.

    Submits a job for each worker. All take units from one queue. The server starts and
    recovers the workers, so this command need not keep running; running it again starts only
    missing workers.
    """
    documents = worker_jobs(out, run_options, options)
    specs = [job_file.parse_job(document) for document in documents]
    if options["dry_run"]:
        if options["as_json"]:
            output.print_json(documents)
        else:
            click.echo(f"# Submit it from a folder with {REQUIREMENTS}, named requirements.txt.")
            click.echo(fleet.to_job_file(documents), nl=False)
        return
    plans.load(open_storage(out))  # raises if there is none
    _launch(out, specs, options)
    if options["monitor"]:
        context.exit(_watch(out, options["monitor_interval"], options["as_json"]))


@click.command(epilog=example_epilog("tpu extract board gs://lab/acts --watch 60"))
@click.argument("out")
@watch_option
@json_option
@click.pass_context
def board(context: click.Context, out: str, watch: float | None, as_json: bool) -> None:
    """Show the fleet that works on OUT.

    One row per worker, with its stored samples, and how many need recovery.
    """
    context.exit(_watch(out, watch, as_json))


def worker_jobs(
    out: str, run_options: Sequence[str], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The jobs that the options of `deploy` describe."""
    return fleet.worker_jobs(
        out,
        zones=_zones(options),
        workers_per_zone=options["workers_per_zone"],
        accelerator=options["tpu_type"],
        capacity=options["capacity"],
        run_options=run_options,
        pool=options["pool"] or (fleet.fleet_tag(out) if options["create_tpus"] else None),
    )


def _zones(options: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(zone.strip() for zone in options["zones"].split(",") if zone.strip())


def _launch(out: str, specs: Sequence[JobSpec], options: dict[str, Any]) -> None:
    from tpufleet.client import snapshots
    from tpufleet.client.fleet import new_job_id

    tag = fleet.fleet_tag(out)
    with connection.connect(start=True) as client, tempfile.TemporaryDirectory() as folder:
        shutil.copy(REQUIREMENTS, Path(folder, "requirements.txt"))
        if options["create_tpus"]:
            client.put_pool(
                Pool(
                    name=options["pool"] or tag,
                    provider=options["provider"],
                    accelerator=type_lookup.find(specs[0].accelerator).name,
                    largest=len(specs),
                    smallest=len(specs),
                    zones=_zones(options),
                    capacity=tuple(Capacity(kind) for kind in options["capacity"]),
                )
            )
        live = {row.name for row in client.all_jobs(state="live", tag=tag)}
        code = snapshots.scan(Path(folder), connection.settings().snapshot_limit)
        snapshots.upload(client, code)
        missing = [
            NewJob(id=new_job_id(), spec=job_file.to_document(spec), snapshot=code.digest)
            for spec in specs
            if spec.name not in live
        ]
        rows = client.submit(missing) if missing else ()
    running = len(specs) - len(rows)
    if options["as_json"] and not options["monitor"]:
        output.print_json({"jobs": rows, "running_already": running})
        return
    for row in rows:
        output.print_submitted(row, options["tpu_type"], err=True)
    if running:
        output.print_status(f"{running} workers are already running")


def _watch(out: str, interval: float | None, as_json: bool) -> int:
    """The exit status. Ctrl-C detaches; the workers continue."""
    tag = fleet.fleet_tag(out)
    try:
        with connection.connect() as client:
            while True:
                rows = list(client.all_jobs(tag=tag))
                status = fleet.fleet_status(
                    out,
                    [
                        fleet.WorkerJob(
                            name=row.name, job_id=row.id, state=row.state, reason=row.reason
                        )
                        for row in rows
                    ],
                )
                _show_board(status, as_json, refresh=interval is not None)
                live = any(row.ended_at is None for row in rows)
                if interval is None or status["done"] or not live:
                    return 0 if interval is None or status["done"] else 1
                time.sleep(interval)
    except KeyboardInterrupt:
        output.print_status(
            "\ndetached; the workers continue\n"
            f"  next: {extract_command('board', out)} shows them, `tpu jobs tag:{tag}` lists "
            "their jobs, `tpu cancel JOB` cancels one"
        )
        return DETACHED


def _show_board(status: dict[str, Any], as_json: bool, refresh: bool) -> None:
    if as_json:
        output.print_json(status)
        return
    if refresh and output.is_terminal():
        click.clear()
    totals = status["totals"]
    click.echo(f"EXTRACTION FLEET  {status['out']}")
    lines = [
        (row["name"], row["status"], f"{row['samples']:,}", f"{row['shards']:,}",
         text.size(row["bytes"]))
        for row in status["workers"]
    ]  # fmt: skip
    lines.append(("TOTALS", "", f"{totals['samples']:,} of {totals['of']:,}",
                  f"{totals['shards']:,}", text.size(totals["bytes"])))  # fmt: skip
    output.print_table(TITLES, lines, "")
    click.echo(
        format_health(
            healthy=status["healthy"], working=status["working"], lost=status["needs_recovery"]
        )
    )
    for row in status["workers"]:
        if row["recovery"]:
            click.echo(f"  {row['name']}: {text.one_line(row['recovery'])}")
