"""`tpu extract export|import|streams|manifest`: formats of other tools and of older scripts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from urllib.parse import urlsplit

import click

from tpufleet_activations.cli.parameter_types import NOT_NEGATIVE


def example_epilog(line: str) -> str:
    return f"\b\nExample:\n  {line}\n"


@click.command(epilog=example_epilog("tpu extract export acts activations-hf --format hf"))
@click.argument("out")
@click.argument("folder")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["pickle", "hf"]),
    default="pickle",
    show_default=True,
    help="Pickle shards of the older scripts, or Parquet files for Hugging Face datasets.",
)
@click.option(
    "--site",
    help="Such as resid_post, for all layers; with hf also resid_post.8.  [default: resid_post; "
    "with hf all]",
)
@click.option(
    "--shard-gb", type=NOT_NEGATIVE, help="Size of a pickle shard, about.  [default: 1.0]"
)
@click.option("--pad-to", type=click.IntRange(1), help="Pad samples with zeros to this many rows.")
@click.option("--no-compress", is_flag=True, help="Write .pkl instead of .pkl.gz.")
def export(
    out: str,
    folder: str,
    kind: str,
    site: str | None,
    shard_gb: float | None,
    pad_to: int | None,
    no_compress: bool,
) -> None:
    """Export the samples of OUT that are committed so far.

    FOLDER is a path, gs://… or s3://…. With --format hf it becomes a dataset repository of Parquet
    files with a row for each token, for `datasets.load_dataset(FOLDER)`, or in a bucket
    `datasets.load_dataset("parquet", data_files="FOLDER/data/*.parquet")`. Otherwise it gets pickle
    shards (shard_0001.pkl.gz), metadata.json and checkpoint_worker_0.json.
    """
    from tpufleet_activations.io import datasets
    from tpufleet_activations.io.storage import open_storage, translate_disk_errors

    again = "the export is incomplete; run it again, which replaces its files"
    if kind == "hf":
        if pad_to or no_compress or shard_gb is not None:
            raise click.UsageError(
                "--shard-gb, --pad-to and --no-compress apply to pickle shards only"
            )
        from tpufleet_activations.io import parquet_export

        dataset, target = datasets.open_dataset(out), open_storage(folder)
        with translate_disk_errors(target, again):
            exported = parquet_export.export_parquet(dataset, target, sites=[site] if site else [])
        others = exported["without_rows"]
        click.echo(
            f"{exported['rows']:,} rows of {_count(exported['samples'], 'sample')} in "
            f"{_count(exported['files'], 'Parquet file')}"
            + (f"; {_count(others, 'sample')} without rows, such as skipped ones" if others else "")
        )
        click.echo(_next_step(folder))
        return
    from tpufleet_migration.activations import pickle_shards

    dataset, target = datasets.open_dataset(out), open_storage(folder)
    with translate_disk_errors(target, again):
        summary = pickle_shards.export_shards(
            dataset,
            target,
            site=site or "resid_post",
            shard_bytes=int((1.0 if shard_gb is None else shard_gb) * 2**30),
            pad_to=pad_to,
            compress=not no_compress,
        )
    shards, samples = summary["total_shards"], summary["total_unique_samples"]
    click.echo(f"{_count(shards, 'shard')}, {_count(samples, 'sample')}")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _next_step(folder: str) -> str:
    """How to use an export for Hugging Face, whose commands take no buckets."""
    if package := {"gs": "gcsfs", "s3": "s3fs"}.get(urlsplit(folder).scheme):
        files = f"{folder.rstrip('/')}/data/train-*.parquet"
        return (
            f"load them with `datasets.load_dataset('parquet', data_files={files!r})`, which needs "
            f"{package}"
        )
    return (
        f"load them with `datasets.load_dataset({folder!r})`, or upload them with "
        f"`hf upload NAME {shlex.quote(folder)} --repo-type dataset`"
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
    from tpufleet_activations.io.storage import open_storage
    from tpufleet_migration.activations import importer

    plan, legacy = importer.import_shards(
        folder, open_storage(out), site=site, skip_incomplete=skip_torn
    )
    click.echo(f"{_count(plan.samples, 'sample')}, {_count(len(plan.sites), 'site')}")
    if len(legacy.records) > plan.samples:
        click.echo(f"skipped {len(legacy.records) - plan.samples:,} samples with missing layers")
    if legacy.reported_samples is not None and legacy.reported_samples > len(legacy.records):
        click.echo(
            f"warning: the checkpoints report {legacy.reported_samples:,} processed samples, but "
            f"the shards contain {len(legacy.records):,}; the others were lost before the import"
        )


@click.command(epilog=example_epilog("tpu extract streams tasks.jsonl streams --streams 32"))
@click.argument("data")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--streams", "count", type=click.IntRange(1), required=True, help="Number of files.")
@click.option("--column", default="examples", show_default=True, help="Column with the pairs.")
@click.option("--max-samples", type=click.IntRange(1), help="Total over all streams.")
@click.option("--overwrite", is_flag=True, help="Replace existing streams.")
def streams(
    data: str, folder: Path, count: int, column: str, max_samples: int | None, overwrite: bool
) -> None:
    """Split a dataset of ARC pairs into stream_NNN.jsonl files.

    DATA is Parquet, JSONL, or a dataset saved to disk. A task is a list of [input, output] pairs in
    the column; the last pair is the test.
    """
    from tpufleet.errors import BadInput, Conflict
    from tpufleet_activations.inputs import sources
    from tpufleet_migration.activations.arc import tasks

    existing = sorted(path for path in folder.glob("*") if tasks.STREAM_NAME.fullmatch(path.name))
    if existing and not overwrite:
        raise Conflict(
            f"{folder} has {len(existing)} streams; choose another folder, or pass --overwrite"
        )
    rows = sources.read_records(data)
    counts = tasks.write_streams(
        (row.get(column) for row in rows), count, folder, max_samples=max_samples
    )
    if not counts["tasks"]:
        for number in range(count):
            (folder / f"stream_{number:03d}.jsonl").unlink()
        raise BadInput(
            f"none of {_count(counts['invalid'], 'row')} of {data} has two or more [input, output] "
            f"pairs of grids in its column {column!r}\n  next: name the column with --column"
        )
    for path in existing:  # from an earlier call with more streams
        if int(path.stem.rpartition("_")[2]) >= count:
            path.unlink()
    click.echo(json.dumps(counts))


@click.command(epilog=example_epilog("tpu extract manifest acts > stream_manifest.json"))
@click.argument("out")
@click.option("--data", help="Location of the streams, if it differs from the plan's.")
def manifest(out: str, data: str | None) -> None:
    """Print the progress of each stream as a stream manifest (JSON)."""
    from tpufleet_activations.io.storage import open_storage
    from tpufleet_migration.activations import stream_status

    click.echo(json.dumps(stream_status.stream_manifest(open_storage(out), data), indent=2))
