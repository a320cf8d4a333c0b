"""`tpu extract deploy` and `tpu extract board`: a fleet of extraction workers as jobs.

The extraction itself is a workload, which knows nothing of jobs; the top layer lends us its plans.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import click

from tpufleet.errors import BadInput
from tpufleet.model import job_file, prices, topology
from tpufleet.model.api_types import JobRow, NewJob
from tpufleet.model.jobs import Capacity
from tpufleet.model.pools import Pool
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option
from tpufleet.views.cli.submit import DETACHED, upload

TITLES = ("TPU NAME", "STATUS", "SAMPLES", "SHARDS", "GCS")
PREFIX = "activations"  # of a bucket that is named alone
# The names that --activation-type had.
ACTIVATION_TYPES = ("residual", "mlp", "attn")


class Fleets(Protocol):
    """What the top layer lends us: see `workloads.activations.deploying`."""

    WorkerJob: Callable[..., Any]

    def is_planned(self, out: str) -> bool: ...
    def prepare_dataset(self, out: str, *, streams: int, **options: Any) -> dict[str, Any]: ...
    def worker_jobs(
        self, out: str, *, zones: Sequence[str], workers_per_zone: int, **more: Any
    ) -> list[dict[str, Any]]: ...
    def to_job_file(self, jobs: Iterable[dict[str, Any]]) -> str: ...
    def fleet_tag(self, out: str) -> str: ...
    def fleet_status(self, out: str, jobs: Iterable[Any]) -> dict[str, Any]: ...


def with_fleets(group: click.Group, lend: Callable[[], Fleets]) -> click.Group:
    """The verbs of extraction, and those that need a control plane. Planning learns the prices."""
    whole = copy.copy(group)  # the workload's own group stays without prices and fleets
    whole.commands = dict(group.commands)
    whole.add_command(_deploy(lend))
    whole.add_command(_board(lend))
    whole.context_settings = {**group.context_settings, "obj": price_of}
    return whole


def price_of(chips: str, capacity: str) -> float | None:
    """Dollars for an hour of one chip, of chips such as `v5e-16`; None where no price is known."""
    if capacity not in list(Capacity):
        raise BadInput(f"capacity {capacity!r} is not one of {', '.join(Capacity)}")
    kind = chips.rpartition("-")[0]
    generation = "v5e" if kind == "v5litepod" else kind
    found = prices.price_table(connection.settings().prices).get((generation, capacity))
    return None if found is None else found.usd


def _deploy(lend: Callable[[], Fleets]) -> click.Command:
    @click.command(
        epilog="""\b
Examples:
  tpu extract deploy gs://lab/acts --zones us-central1-a,europe-west4-b --workers-per-zone 8
  tpu extract deploy gs://lab/acts --zones us-central1-a --skip-dataset --monitor
""",
    )
    @click.argument("out", required=False)
    @click.argument("run_options", metavar="[-- RUN OPTIONS…]", nargs=-1, type=click.UNPROCESSED)
    @click.option("--gcs-bucket", help=f"In place of OUT: gs://BUCKET/{PREFIX}.")
    @click.option("--zones", required=True, help="Separated by commas.")
    @click.option("--workers-per-zone", type=int, default=1, show_default=True, help="Jobs.")
    @click.option("--tpu-type", default="v5litepod-8", show_default=True, help="Of each worker.")
    @click.option("--dataset", help="ARC pairs to cut into streams: path, bucket or hub name.")
    @click.option("--column", default="examples", show_default=True, help="Of the pairs.")
    @click.option("--model", help="Folder, bucket or hub name.  [default: Qwen/Qwen2.5-0.5B]")
    @output.repeatable("--site", help="What to store, such as resid_post.12.")
    @click.option("--activation-type", type=click.Choice(ACTIVATION_TYPES), help="Of all layers.")
    @click.option("--max-samples", type=click.IntRange(1), help="Tasks in all streams together.")
    @click.option("--max-length", type=click.IntRange(1), help="Most tokens of a sample.")
    @click.option("--stream-offset", default=0, show_default=True, help="Number of the first.")
    @output.repeatable(
        "--capacity", default=["spot"], type=click.Choice([kind.value for kind in Capacity])
    )
    @click.option("--pool", help="Run on slices of this pool.")
    @click.option("--create-tpus", is_flag=True, help="First make a pool that holds them all.")
    @click.option("--provider", default="tpu-vm", show_default=True, help="Of that pool.")
    @click.option("--skip-dataset", is_flag=True, help="OUT is planned; place nothing.")
    @click.option("--skip-launch", is_flag=True, help="Place the dataset, submit nothing.")
    @click.option("--dry-run", is_flag=True, help="Print the jobs as a job file, submit nothing.")
    @click.option("--monitor", is_flag=True, help="Then show the fleet until it is done.")
    @click.option(
        "--monitor-interval",
        type=click.FloatRange(0, min_open=True),
        default=60.0,
        show_default=True,
        help="Seconds between two looks.",
    )
    @click.option("--nohup", is_flag=True, help="Do not stay; the control plane watches anyway.")
    @json_option
    @click.pass_context
    def deploy(
        context: click.Context, out: str | None, run_options: tuple[str, ...], **options: Any
    ) -> None:
        """Set a fleet of workers on the dataset in OUT.

        Places the dataset, submits the jobs, and shows them. The dataset is cut into one stream for
        each worker and planned, unless OUT is planned already. Every worker takes units from one
        queue. The control plane starts and recovers the workers, so nothing has to stay running
        here; doing this again starts only what is missing.
        """
        fleets, out = lend(), _address(out, options["gcs_bucket"])
        zones = [zone.strip() for zone in options["zones"].split(",") if zone.strip()]
        wanted = fleets.worker_jobs(
            out,
            zones=zones,
            workers_per_zone=options["workers_per_zone"],
            accelerator=options["tpu_type"],
            stream_offset=options["stream_offset"],
            capacity=options["capacity"],
            run_options=run_options,
            pool=options["pool"] or (fleets.fleet_tag(out) if options["create_tpus"] else None),
        )
        parsed = [job_file.parse_job(job) for job in wanted]
        if options["dry_run"]:
            click.echo(fleets.to_job_file(wanted), nl=False)
            return
        _place(fleets, out, len(wanted), options)
        if not options["skip_launch"]:
            _launch(fleets, out, parsed, zones, options)
        if options["monitor"] and not options["nohup"]:
            context.exit(_watch(fleets, out, options["monitor_interval"], options["as_json"]))

    return deploy


def _board(lend: Callable[[], Fleets]) -> click.Command:
    @click.command(epilog="\b\nExample:\n  tpu extract board gs://lab/acts --watch 60\n")
    @click.argument("out")
    @click.option(
        "--watch",
        type=click.FloatRange(0, min_open=True),
        help="Show it again after so many seconds.",
    )
    @json_option
    @click.pass_context
    def board(context: click.Context, out: str, watch: float | None, as_json: bool) -> None:
        """The fleet that works on OUT.

        Each worker, what it stored, and who needs recovery.
        """
        context.exit(_watch(lend(), out, watch, as_json))

    return board


def _address(out: str | None, bucket: str | None) -> str:
    if (out is None) == (bucket is None):
        raise BadInput("say where the dataset goes: OUT, or --gcs-bucket")
    return out or f"gs://{(bucket or '').removeprefix('gs://').strip('/')}/{PREFIX}"


def _place(fleets: Fleets, out: str, streams: int, options: dict[str, Any]) -> None:
    there = fleets.is_planned(out)
    if options["skip_dataset"] or (there and options["dataset"] is None):
        if not there:
            raise BadInput(f"{out} has no plan yet; leave out --skip-dataset, or plan it first")
        return
    named = {name: options[name] for name in ("dataset", "model", "max_samples", "max_length")}
    chosen = options["site"] or [f"{options['activation_type'] or 'residual'}.*"]
    facts = fleets.prepare_dataset(
        out,
        streams=streams,
        stream_offset=options["stream_offset"],
        column=options["column"],
        choices=chosen,
        **{name: value for name, value in named.items() if value is not None},
    )
    output.print_status(
        f"placed {facts['tasks']:,} tasks ({facts['invalid']:,} were invalid) in "
        f"{facts['streams']} streams; planned {facts['samples']:,} samples in "
        f"{facts['units']:,} units, {text.size(facts['estimate']['bytes'])}"
    )


def _launch(
    fleets: Fleets, out: str, wanted: list[Any], zones: list[str], options: dict[str, Any]
) -> None:
    import tempfile
    from pathlib import Path

    from tpufleet.client import snapshots
    from tpufleet.client.fleet import new_job_id

    with connection.connect(start=True) as client, tempfile.TemporaryDirectory() as empty:
        if options["create_tpus"]:
            client.put_pool(
                Pool(
                    name=options["pool"] or fleets.fleet_tag(out),
                    provider=options["provider"],
                    accelerator=topology.find(wanted[0].accelerator).name,
                    largest=len(wanted),
                    smallest=len(wanted),
                    zones=tuple(zones),
                    capacity=tuple(Capacity(kind) for kind in options["capacity"]),
                )
            )
        live = {row.name for row in client.all_jobs(state="live", tag=fleets.fleet_tag(out))}
        code = snapshots.scan(Path(empty), connection.settings().snapshot_limit)
        upload(client, code)
        missing = [
            NewJob(id=new_job_id(), spec=job_file.to_document(spec), snapshot=code.digest)
            for spec in wanted
            if spec.name not in live
        ]
        rows = client.submit(missing) if missing else ()
    _tell(rows, len(wanted) - len(rows), options["as_json"] and not options["monitor"])


def _tell(rows: Sequence[JobRow], kept: int, as_json: bool) -> None:
    if as_json:
        output.print_json({"jobs": rows, "running_already": kept})
        return
    for row in rows:
        output.print_status(f"submitted {row.name} as {row.id} on {row.accelerator}")
    if kept:
        output.print_status(f"{kept} of the workers are there already")


def _watch(fleets: Fleets, out: str, every: float | None, as_json: bool) -> int:
    """The exit status. Ctrl-C leaves the jobs running, and says so."""
    try:
        with connection.connect() as client:
            while True:
                rows = list(client.all_jobs(tag=fleets.fleet_tag(out)))
                found = fleets.fleet_status(
                    out,
                    [
                        fleets.WorkerJob(name=row.name, job_id=row.id, state=row.state)
                        for row in rows
                    ],
                )
                _show(found, as_json, again=every is not None)
                left = any(row.ended_at is None for row in rows)
                if every is None or found["done"] or not left:
                    return 0 if every is None or found["done"] else 1
                time.sleep(every)
    except KeyboardInterrupt:
        output.print_status(
            f"\nyou left; the workers go on. `tpu extract board {out}` shows them again, "
            f"`tpu jobs --tag {fleets.fleet_tag(out)}` lists their jobs, `tpu cancel` stops one"
        )
        return DETACHED


def _show(found: dict[str, Any], as_json: bool, again: bool) -> None:
    if as_json:
        output.print_json(found)
        return
    if again and output.is_terminal():
        click.clear()
    totals = found["totals"]
    lines = [
        (row["name"], row["status"], f"{row['samples']:,}", f"{row['shards']:,}",
         text.size(row["bytes"]))
        for row in found["workers"]
    ]  # fmt: skip
    lines.append(("TOTALS", "", f"{totals['samples']:,} of {totals['of']:,}",
                  f"{totals['shards']:,}", text.size(totals["bytes"])))  # fmt: skip
    output.print_table(TITLES, lines, "")
    click.echo(
        f"Healthy: {found['healthy']}  Working: {found['working']}  "
        f"Needs Recovery: {found['needs_recovery']}  Last update: {time.strftime('%H:%M:%S')}"
    )
