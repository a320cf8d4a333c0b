"""`tpu extract export|import|streams|manifest`: the formats of the former scripts."""

from __future__ import annotations

import json
from typing import Any

import click

from tpufleet.errors import BadInput, Conflict
from tpufleet_activations.cli import dataset
from tpufleet_activations.cli.parameter_types import NOT_NEGATIVE
from tpufleet_activations.formatting import example_epilog, format_count
from tpufleet_activations.inputs import sources
from tpufleet_activations.io import datasets
from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.io.storage import translate_disk_errors
from tpufleet_migration.activations import importer, pickle_shards, stream_status
from tpufleet_migration.activations.arc import tasks


@click.pass_context
def _export(
    context: click.Context,
    out: str,
    folder: str,
    site: str | None,
    format: str,
    shard_gb: float,
    pad_to: int | None,
    no_compress: bool,
) -> None:
    if format == "hf":
        context.invoke(dataset.export, out=out, folder=folder, site=site)
        return
    target = open_storage(folder)
    stored = datasets.open_dataset(out)
    kinds = {name.partition(".")[0] for name in stored.plan.sites}
    with translate_disk_errors(target, dataset.EXPORT_AGAIN):
        summary = pickle_shards.export_shards(
            stored,
            target,
            site=site or (kinds.pop() if len(kinds) == 1 else "resid_post"),
            shard_bytes=int(shard_gb * 2**30),
            pad_to=pad_to,
            compress=not no_compress,
        )
    shards, samples = summary["total_shards"], summary["total_unique_samples"]
    click.echo(f"{format_count(shards, 'shard')}, {format_count(samples, 'sample')}")


def _pickle_option(name: str, **attributes: Any) -> click.Option:
    return click.Option([name], hidden=True, **attributes)


export = click.Command(
    "export",
    callback=_export,
    params=[
        *dataset.export.params,
        click.Option(
            ["--format"],
            type=click.Choice(["hf", "pickle"]),
            default="hf",
            show_default=True,
            help="Parquet files, or pickle shards of the former scripts.",
        ),
        _pickle_option("--shard-gb", type=NOT_NEGATIVE, default=1.0),
        _pickle_option("--pad-to", type=click.IntRange(1)),
        _pickle_option("--no-compress", is_flag=True),
    ],
    help=dataset.export.help,
    epilog=dataset.export.epilog,
)


@click.command("import", epilog=example_epilog("tpu extract import old-shards acts"))
@click.argument("folder")
@click.argument("out")
@click.option("--site", default="resid_post", show_default=True, help="Site of the activations.")
@click.option("--skip-torn", is_flag=True, help="Skip samples with missing layers.")
def import_shards(folder: str, out: str, site: str, skip_torn: bool) -> None:
    """Import a folder of pickle shards as a dataset in OUT.

    FOLDER is a path, gs://… or s3://…. Sub-folders of several workers (tpu_0, host_00) are
    imported together. An interrupted import resumes when run again.
    """
    plan, legacy = importer.import_shards(
        folder, open_storage(out), site=site, skip_incomplete=skip_torn
    )
    click.echo(f"{format_count(plan.samples, 'sample')}, {format_count(len(plan.sites), 'site')}")
    if len(legacy.records) > plan.samples:
        click.echo(f"skipped {len(legacy.records) - plan.samples:,} samples with missing layers")
    if legacy.reported_samples is not None and legacy.reported_samples > len(legacy.records):
        click.echo(
            f"warning: the checkpoints report {legacy.reported_samples:,} processed samples, but "
            f"the shards contain {len(legacy.records):,}; the others were lost before the import"
        )


@click.command(epilog=example_epilog("tpu extract streams tasks.jsonl streams --streams 32"))
@click.argument("data")
@click.argument("folder")
@click.option("--streams", "count", type=click.IntRange(1), required=True, help="Number of files.")
@click.option("--column", default="examples", show_default=True, help="Column with the pairs.")
@click.option("--max-samples", type=click.IntRange(1), help="Total over all streams.")
@click.option("--overwrite", is_flag=True, help="Replace existing streams.")
def streams(
    data: str, folder: str, count: int, column: str, max_samples: int | None, overwrite: bool
) -> None:
    """Split a dataset of ARC pairs into stream_NNN.jsonl files.

    DATA is Parquet, JSONL, or a dataset saved to disk; FOLDER is a path, gs://… or s3://…. A task
    is a list of [input, output] pairs in the column; the last pair is the test.
    """
    storage = open_storage(folder)
    existing = tasks.stored_streams(storage)
    if existing and not overwrite:
        raise Conflict(
            f"{folder} has {len(existing)} streams; choose another folder, or pass --overwrite"
        )
    rows = sources.read_records(data)
    counts = tasks.store_streams(
        (row.get(column) for row in rows), count, storage, max_samples=max_samples
    )
    if not counts["tasks"]:
        raise BadInput(
            f"none of {format_count(counts['invalid'], 'row')} of {data} has two or more "
            f"[input, output] pairs of grids in its column {column!r}\n"
            "  next: name the column with --column"
        )
    click.echo(json.dumps(counts))


@click.command(epilog=example_epilog("tpu extract manifest acts > stream_manifest.json"))
@click.argument("out")
@click.option("--data", help="Location of the streams, if it differs from the plan's.")
def manifest(out: str, data: str | None) -> None:
    """Print the progress of each stream as a stream manifest (JSON)."""
    click.echo(json.dumps(stream_status.stream_manifest(open_storage(out), data), indent=2))
