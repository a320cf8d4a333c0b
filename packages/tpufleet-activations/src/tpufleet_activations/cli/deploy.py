"""`tpu extract deploy` and `board`: run extraction as jobs, and show them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tpufleet.errors import BadInput
from tpufleet.model.api_types import JobRow, NewJob
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.job import job_file
from tpufleet.model.job.jobs import Capacity, JobSpec
from tpufleet.model.tpu import topology
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.jobs.submit import DETACHED
from tpufleet.views.cli.output import json_option
from tpufleet_activations import fleet
from tpufleet_activations.cli.parameter_types import SECONDS
from tpufleet_activations.formatting import extract_command

TITLES = ("TPU NAME", "STATUS", "SAMPLES", "SHARDS", "GCS")
PREFIX = "activations"  # folder in --gcs-bucket
# Former values of --activation-type.
ACTIVATION_TYPES = ("residual", "mlp", "attn")


@click.command(
    epilog="""\b
Examples:
  tpu extract deploy gs://lab/acts --zones us-central1-a,europe-west4-b --workers-per-zone 8
  tpu extract deploy gs://lab/acts --zones us-central1-a --skip-dataset --monitor
""",
)
@click.argument("out", required=False)
@click.argument("run_options", metavar="[-- RUN OPTIONS…]", nargs=-1, type=click.UNPROCESSED)
@click.option("--gcs-bucket", help=f"Instead of OUT: gs://BUCKET/{PREFIX}.")
@click.option("--zones", required=True, help="Comma-separated zones.")
@click.option("--workers-per-zone", type=int, default=1, show_default=True, help="Jobs per zone.")
@click.option("--tpu-type", default="v5litepod-8", show_default=True, help="Type of each worker.")
@click.option("--dataset", help="ARC pairs to split into streams: path, bucket or hub name.")
@click.option("--column", default="examples", show_default=True, help="Column of the pairs.")
@click.option("--model", help="Folder, bucket or hub name.  [default: Qwen/Qwen2.5-0.5B]")
@output.repeatable("--site", help="Site to store, such as resid_post.12; repeatable.")
@click.option("--activation-type", type=click.Choice(ACTIVATION_TYPES), help="Of all layers.")
@click.option("--max-samples", type=click.IntRange(1), help="Maximum tasks over all streams.")
@click.option("--max-length", type=click.IntRange(1), help="Maximum tokens of a sample.")
@click.option(
    "--compute", type=click.Choice(["bf16", "f32"]), help="Of the forward pass.  [default: bf16]"
)
@click.option("--stream-offset", default=0, show_default=True, help="Number of the first stream.")
@output.repeatable(
    "--capacity", default=["spot"], type=click.Choice([kind.value for kind in Capacity])
)
@click.option("--pool", help="Run on slices of this pool.")
@click.option("--create-tpus", is_flag=True, help="First create a pool for all workers.")
@click.option("--provider", default="tpu-vm", show_default=True, help="Provider of that pool.")
@click.option("--skip-dataset", is_flag=True, help="OUT has a plan; upload nothing.")
@click.option("--skip-launch", is_flag=True, help="Upload the dataset, submit nothing.")
@click.option("--dry-run", is_flag=True, help="Print the jobs as a job file, submit nothing.")
@click.option("--monitor", is_flag=True, help="Then show the fleet until it is done.")
@click.option(
    "--monitor-interval",
    type=SECONDS,
    default=60.0,
    show_default=True,
    help="Seconds between two updates.",
)
@click.option("--nohup", is_flag=True, help="Return at once; the control plane runs the workers.")
@json_option
@click.pass_context
def deploy(
    context: click.Context, out: str | None, run_options: tuple[str, ...], **options: Any
) -> None:
    """Run a fleet of workers on the dataset in OUT.

    Uploads the dataset, submits the jobs, and shows them. The dataset is split into one stream per
    worker and planned, unless OUT has a plan already. All workers take units from one queue. The
    control plane starts and recovers the workers, so this command need not keep running; running it
    again starts only missing workers.
    """
    location = _location(out, options["gcs_bucket"])
    zones = [zone.strip() for zone in options["zones"].split(",") if zone.strip()]
    tag = fleet.fleet_tag(location)
    documents = fleet.worker_jobs(
        location,
        zones=zones,
        workers_per_zone=options["workers_per_zone"],
        accelerator=options["tpu_type"],
        stream_offset=options["stream_offset"],
        capacity=options["capacity"],
        run_options=run_options,
        pool=options["pool"] or (tag if options["create_tpus"] else None),
    )
    specs = [job_file.parse_job(document) for document in documents]
    if options["dry_run"]:
        if options["as_json"]:
            output.print_json(documents)
        else:
            click.echo(fleet.to_job_file(documents), nl=False)
        return
    _prepare_dataset(location, len(documents), options)
    if not options["skip_launch"]:
        _launch(location, specs, zones, options)
    if options["monitor"] and not options["nohup"]:
        context.exit(_watch(location, options["monitor_interval"], options["as_json"]))


@click.command(epilog="\b\nExample:\n  tpu extract board gs://lab/acts --watch 60\n")
@click.argument("out")
@click.option(
    "--watch",
    type=SECONDS,
    help="Refresh every so many seconds.",
)
@json_option
@click.pass_context
def board(context: click.Context, out: str, watch: float | None, as_json: bool) -> None:
    """Show the fleet that works on OUT.

    One row per worker, with its stored samples, and how many need recovery.
    """
    context.exit(_watch(out, watch, as_json))


def _location(out: str | None, bucket: str | None) -> str:
    if (out is None) == (bucket is None):
        raise BadInput("pass either OUT or --gcs-bucket")
    return out or f"gs://{(bucket or '').removeprefix('gs://').strip('/')}/{PREFIX}"


def _prepare_dataset(out: str, streams: int, options: dict[str, Any]) -> None:
    planned = fleet.is_planned(out)
    if options["skip_dataset"] or (planned and options["dataset"] is None):
        if not planned:
            raise BadInput(
                f"{out} has no plan; omit --skip-dataset, or create one with `tpu extract plan`"
            )
        return
    names = ("dataset", "model", "max_samples", "max_length", "compute")
    optional = {name: options[name] for name in names}
    sites = options["site"] or [f"{options['activation_type'] or 'residual'}.*"]
    summary = fleet.prepare_dataset(
        out,
        streams=streams,
        stream_offset=options["stream_offset"],
        column=options["column"],
        choices=sites,
        **{name: value for name, value in optional.items() if value is not None},
    )
    output.print_status(
        f"uploaded {summary['tasks']:,} tasks ({summary['invalid']:,} invalid) in "
        f"{summary['streams']} streams; planned {summary['samples']:,} samples in "
        f"{summary['units']:,} units, {text.size(summary['estimate']['bytes'])}"
    )


def _launch(
    out: str, specs: Sequence[JobSpec], zones: Sequence[str], options: dict[str, Any]
) -> None:
    from tpufleet.client import snapshots
    from tpufleet.client.fleet import new_job_id

    tag = fleet.fleet_tag(out)
    with connection.connect(start=True) as client, tempfile.TemporaryDirectory() as empty:
        if options["create_tpus"]:
            client.put_pool(
                Pool(
                    name=options["pool"] or tag,
                    provider=options["provider"],
                    accelerator=topology.find(specs[0].accelerator).name,
                    largest=len(specs),
                    smallest=len(specs),
                    zones=tuple(zones),
                    capacity=tuple(Capacity(kind) for kind in options["capacity"]),
                )
            )
        live = {row.name for row in client.all_jobs(state="live", tag=tag)}
        code = snapshots.scan(Path(empty), connection.settings().snapshot_limit)
        snapshots.upload(client, code)
        missing = [
            NewJob(id=new_job_id(), spec=job_file.to_document(spec), snapshot=code.digest)
            for spec in specs
            if spec.name not in live
        ]
        rows = client.submit(missing) if missing else ()
    _show_submitted(
        rows,
        len(specs) - len(rows),
        options["tpu_type"],
        as_json=options["as_json"] and not options["monitor"],
    )


def _show_submitted(
    rows: Sequence[JobRow], running: int, accelerator: str, *, as_json: bool
) -> None:
    if as_json:
        output.print_json({"jobs": rows, "running_already": running})
        return
    for row in rows:
        output.print_status(f"submitted {row.name} as {row.id} on {accelerator}")
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
                        fleet.WorkerJob(name=row.name, job_id=row.id, state=row.state)
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
    lines = [
        (row["name"], row["status"], f"{row['samples']:,}", f"{row['shards']:,}",
         text.size(row["bytes"]))
        for row in status["workers"]
    ]  # fmt: skip
    lines.append(("TOTALS", "", f"{totals['samples']:,} of {totals['of']:,}",
                  f"{totals['shards']:,}", text.size(totals["bytes"])))  # fmt: skip
    output.print_table(TITLES, lines, "")
    click.echo(
        f"Healthy: {status['healthy']}  Working: {status['working']}  "
        f"Needs Recovery: {status['needs_recovery']}  Last update: {time.strftime('%H:%M:%S')}"
    )
