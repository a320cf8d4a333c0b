"""`tpu extract deploy` with the options of the former script: it also splits a dataset of ARC pairs
into streams, and plans it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tpufleet.errors import BadInput, Conflict, one_of
from tpufleet.views import text
from tpufleet.views.cli import output
from tpufleet_activations import plans
from tpufleet_activations.cli import deploy as fleet_deploy
from tpufleet_activations.inputs import sources
from tpufleet_activations.io import remote_files
from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.io.storage import Storage
from tpufleet_migration.activations.arc import tasks
from tpufleet_migration.activations.options import ACTIVATION_TYPES

MODEL = "Qwen/Qwen2.5-0.5B"
DATASET = "barc0/200k_HEAVY_gpt4o-description-gpt4omini-code_generated_problems"
COLUMN = "examples"
PREFIX = "activations"  # folder in --gcs-bucket
STREAMS = "streams"  # prefix of the task files in the output folder


def _option(*names: str, **attributes: Any) -> click.Option:
    return click.Option(names, hidden=True, **attributes)


OPTIONS = [
    _option("--gcs-bucket"),
    _option("--dataset"),
    _option("--model", default=MODEL),
    _option("--activation-type", type=click.Choice(list(ACTIVATION_TYPES)), default="residual"),
    _option("--max-samples", type=click.IntRange(1)),
    _option("--stream-offset", default=0),
    _option("--skip-dataset", is_flag=True),
    _option("--skip-launch", is_flag=True),
    _option("--nohup", is_flag=True),
]


@click.pass_context
def _deploy(
    context: click.Context,
    out: str | None,
    run_options: tuple[str, ...],
    gcs_bucket: str | None,
    dataset: str | None,
    model: str,
    activation_type: str,
    max_samples: int | None,
    stream_offset: int,
    skip_dataset: bool,
    skip_launch: bool,
    nohup: bool,
    **options: Any,
) -> None:
    if (out is None) == (gcs_bucket is None):
        raise one_of("OUT", "--gcs-bucket")
    location = out or f"gs://{(gcs_bucket or '').removeprefix('gs://').strip('/')}/{PREFIX}"
    jobs = fleet_deploy.worker_jobs(location, run_options, options)  # checks the options first
    # Without an option of the former script, OUT has a plan.
    if (dataset or gcs_bucket) and not options["dry_run"] and not skip_dataset:
        storage = open_storage(location)
        if dataset or not _has_plan(storage):
            counts = prepare_dataset(
                storage,
                streams=len(jobs),
                stream_offset=stream_offset,
                dataset=dataset or DATASET,
                max_samples=max_samples,
                model=model,
                choices=[f"{ACTIVATION_TYPES[activation_type]}.*"],
            )
            output.print_status(
                f"uploaded {counts['tasks']:,} tasks ({counts['invalid']:,} invalid) in "
                f"{counts['streams']} streams; planned {counts['samples']:,} samples in "
                f"{counts['units']:,} units, {text.size(counts['estimate']['bytes'])}"
            )
    if not skip_launch:
        options["monitor"] = options["monitor"] and not nohup
        context.invoke(fleet_deploy.deploy, out=location, run_options=run_options, **options)


deploy = click.Command(
    "deploy",
    callback=_deploy,
    params=[
        click.Argument(["out"], required=False),
        *(param for param in fleet_deploy.deploy.params if param.name != "out"),
        *OPTIONS,
    ],
    help=fleet_deploy.deploy.help,
    epilog=fleet_deploy.deploy.epilog,
)


def prepare_dataset(
    storage: Storage,
    *,
    streams: int,
    stream_offset: int = 0,
    dataset: str = DATASET,
    max_samples: int | None = None,
    model: str = MODEL,
    choices: Sequence[str] = ("resid_post.*",),
    **settings: Any,
) -> dict[str, Any]:
    """Split a dataset of ARC pairs into stream files below the output, and write the plan there."""
    from tpufleet_activations.pipeline import planning  # imports JAX, which takes long

    if _has_plan(storage):
        raise Conflict(f"{storage.url} is already planned; pass --skip-dataset to use that plan")
    rows = sources.read_records(str(remote_files.dataset_folder(dataset)))
    # An interrupted call with more workers may have left streams that would be read too.
    counts = tasks.store_streams(
        (row.get(COLUMN) for row in rows),
        streams,
        storage,
        f"{STREAMS}/",
        max_samples=max_samples,
        first=stream_offset,
    )
    if not counts["tasks"]:
        raise BadInput(f"no ARC pairs in column {COLUMN!r} of {dataset}")
    data = {"kind": "arc", "path": f"{storage.url.rstrip('/')}/{STREAMS}"}
    if Path(model).is_dir():  # workers have other working directories
        model = str(Path(model).absolute())
    plan = planning.make_plan(model=model, data=data, choices=choices, **settings)
    plans.write(storage, plan)
    return {**counts, "samples": plan.samples, "units": plan.units, "estimate": plan.estimate}


def _has_plan(storage: Storage) -> bool:
    return plans.PLAN_FILE in storage.names(plans.PLAN_FILE)
