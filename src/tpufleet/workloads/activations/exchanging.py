"""`tpu extract export|import|streams|manifest`: to and from what the former scripts wrote."""

from __future__ import annotations

import json
from pathlib import Path

import click


def example_epilog(line: str) -> str:
    return f"\b\nExample:\n  {line}\n"


@click.command(epilog=example_epilog("tpu extract export acts old-shards"))
@click.argument("out")
@click.argument("folder")
@click.option("--site", default="resid_post", show_default=True, help="Written for all its layers.")
@click.option("--shard-gb", type=click.FloatRange(min=0), default=1.0, show_default=True)
@click.option("--pad-to", type=click.IntRange(1), help="Pad samples with zeros to so many rows.")
@click.option("--no-compress", is_flag=True, help="Write .pkl in place of .pkl.gz.")
def export(
    out: str, folder: str, site: str, shard_gb: float, pad_to: int | None, no_compress: bool
) -> None:
    """Write OUT as former shards (shard_0001.pkl.gz).

    FOLDER is a path, gs://… or s3://…. What is committed so far is written, with metadata.json and
    checkpoint_worker_0.json.
    """
    from tpufleet.workloads.activations import legacy
    from tpufleet.workloads.activations.io import datasets
    from tpufleet.workloads.activations.io.storage import open_storage

    facts = legacy.export_shards(
        datasets.open_dataset(out),
        open_storage(folder),
        site=site,
        shard_bytes=int(shard_gb * 2**30),
        pad_to=pad_to,
        compress=not no_compress,
    )
    click.echo(f"{facts['total_shards']:,} shards, {facts['total_unique_samples']:,} samples")


@click.command("import", epilog=example_epilog("tpu extract import old-shards acts"))
@click.argument("folder")
@click.argument("out")
@click.option("--site", default="resid_post", show_default=True, help="What the shards hold.")
@click.option("--skip-torn", is_flag=True, help="Leave out samples that lack some layers.")
def import_shards(folder: str, out: str, site: str, skip_torn: bool) -> None:
    """Make a dataset in OUT of a folder of former shards.

    FOLDER is a path, gs://… or s3://…. Folders of several workers (tpu_0, host_00) are taken in
    together. Doing it again goes on where it was left.
    """
    from tpufleet.workloads.activations import importing
    from tpufleet.workloads.activations.io.storage import open_storage

    made, found = importing.import_shards(
        folder, open_storage(out), site=site, skip_incomplete=skip_torn
    )
    click.echo(f"{made.samples:,} samples, {len(made.sites)} sites")
    if len(found.records) > made.samples:
        click.echo(f"{len(found.records) - made.samples:,} samples lacked some layers: left out")
    if found.reported_samples is not None and found.reported_samples > len(found.records):
        click.echo(
            f"the former checkpoints say that {found.reported_samples:,} samples were processed, but the "
            f"shards hold {len(found.records):,}: the former run lost the others"
        )


@click.command(epilog=example_epilog("tpu extract streams tasks.jsonl streams --streams 32"))
@click.argument("data")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--streams", "count", type=click.IntRange(1), required=True, help="How many.")
@click.option("--column", default="examples", show_default=True, help="Of the pairs.")
@click.option("--max-samples", type=click.IntRange(1), help="In all streams together.")
@click.option("--overwrite", is_flag=True, help="Also where streams lie already.")
def streams(
    data: str, folder: Path, count: int, column: str, max_samples: int | None, overwrite: bool
) -> None:
    """Cut a dataset of ARC pairs into stream_NNN.jsonl files.

    DATA is Parquet, JSONL, or a dataset saved to disk.
    """
    from tpufleet.errors import Conflict
    from tpufleet.workloads.activations import inputs
    from tpufleet.workloads.activations.arc import tasks

    there = sorted(folder.glob("stream_*.jsonl"))
    if there and not overwrite:
        raise Conflict(f"{folder} holds {len(there)} streams; choose another, or say --overwrite")
    rows = inputs.read_records(data)
    done = tasks.write_streams(
        (row.get(column) for row in rows), count, folder, max_samples=max_samples
    )
    for path in there:  # more of them than now
        if int(path.stem.rpartition("_")[2]) >= count:
            path.unlink()
    click.echo(json.dumps(done))


@click.command(epilog=example_epilog("tpu extract manifest acts > stream_manifest.json"))
@click.argument("out")
@click.option("--data", help="Where the streams lie on this machine, if not where they were.")
def manifest(out: str, data: str | None) -> None:
    """How far each stream is, as a former manifest (JSON)."""
    from tpufleet.workloads.activations.arc import streaming
    from tpufleet.workloads.activations.io.storage import open_storage

    click.echo(json.dumps(streaming.stream_manifest(open_storage(out), data), indent=2))
