"""`tpu extract status|show|stats|verify|repair|export`: commands on a dataset."""

from __future__ import annotations

import shlex
from pathlib import Path
from urllib.parse import urlsplit

import click

from tpufleet import runtime
from tpufleet_activations.cli import output
from tpufleet_activations.cli.parameter_types import json_option, location_options, watch_option
from tpufleet_activations.formatting import example_epilog, extract_command, format_count
from tpufleet_activations.io import datasets, verification
from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.io.storage import translate_disk_errors


@click.command(epilog=example_epilog("tpu extract status acts --watch 5"))
@click.argument("outs", nargs=-1, required=True)
@json_option
@watch_option
def status(outs: tuple[str, ...], as_json: bool, watch: float | None) -> None:
    """Show the progress of datasets and their workers."""
    output.watch_status({out: open_storage(out) for out in outs}, as_json=as_json, every=watch)


@click.command(epilog=example_epilog("tpu extract show acts 17"))
@click.argument("out")
@click.argument("sample", type=click.IntRange(0))
@json_option
def show(out: str, sample: int, as_json: bool) -> None:
    """Show the metadata of a stored sample and a summary of its activations."""
    output.show_sample(datasets.open_dataset(out), sample, as_json=as_json)


@click.command(epilog=example_epilog("tpu extract stats acts"))
@click.argument("out")
@json_option
def stats(out: str, as_json: bool) -> None:
    """Show statistics of each site: mean, norm, largest value, values that are not finite.

    They are of 65,536 rows spread over the dataset, or of all if there are fewer.
    """
    output.show_statistics(datasets.open_dataset(out), as_json=as_json)


@click.command(epilog=example_epilog("tpu extract verify acts"))
@click.argument("out")
@click.option("--quick", is_flag=True, help="Check records and sizes only, not checksums.")
@click.option(
    "--sweep",
    is_flag=True,
    help="Delete shards left by dead workers or replaced by repairs, if complete.",
)
@json_option
@click.pass_context
def verify(context: click.Context, out: str, quick: bool, sweep: bool, as_json: bool) -> None:
    """Check that every sample is stored exactly once and all checksums match."""
    storage = open_storage(out)
    report = verification.verify(storage, deep=not quick)
    output.show_report(report, out, as_json=as_json)
    if sweep:
        deleted = verification.delete_leftovers(storage)
        click.echo(f"deleted {len(deleted):,} leftovers", err=as_json)
    context.exit(0 if report.intact else 1)


@click.command(epilog=example_epilog("tpu extract repair acts"))
@click.argument("out")
@click.option("--quick", is_flag=True, help="Find bad units by records and sizes only.")
@click.option(
    "--reopen-only", is_flag=True, help="Return bad units to the queue; workers rebuild them."
)
@location_options
@click.pass_context
def repair(
    context: click.Context,
    out: str,
    quick: bool,
    reopen_only: bool,
    model: str | None,
    data: str | None,
) -> None:
    """Find damaged units of OUT and extract them again. Good units are not changed."""
    from tpufleet_activations.pipeline import extraction

    storage = open_storage(out)
    report = verification.verify(storage, deep=not quick)
    if not report.bad_units:
        output.show_report(report, out, as_json=False)
        return
    output.show_problems(report)
    with translate_disk_errors(storage):
        reopened = verification.reopen(storage, report.bad_units)
    run = extract_command("run", out)
    click.echo(
        f"reopened {len(reopened):,} of {report.units:,} units"
        + (f"; rebuild them with {run}, on any number of machines" if reopen_only else "")
    )
    if reopen_only:
        return
    runtime.initialize()
    meter = extraction.run(storage, model=model, data=data, on_progress=output.ProgressLine())
    output.show_end(meter)
    after = verification.verify(storage, deep=not quick, only=report.bad_units)
    output.show_report(after, out, as_json=False)
    context.exit(0 if after.intact else 1)


@click.command("latents", epilog=example_epilog("tpu extract latents acts 117 --html latents.html"))
@click.argument("out")
@click.argument("chosen", metavar="LATENT...", type=click.IntRange(0), nargs=-1, required=True)
@click.option("--html", "page", metavar="FILE", help="Write a page with contexts.")
@json_option
def show_latents(out: str, chosen: tuple[int, ...], page: str | None, as_json: bool) -> None:
    """Show where latents are strongest, in a dataset of `tpu extract plan --encode`.

    The first time, and when there are more rows, an index is built in OUT.
    """
    from tpufleet_activations.io.latents import LatentIndex

    dataset = datasets.open_dataset(out)
    with translate_disk_errors(dataset.storage):
        index = LatentIndex(dataset)
    output.show_latents(index, chosen, as_json=as_json)
    if page is not None:
        from tpufleet_activations import latent_page
        from tpufleet_activations.io import remote_files

        folder = remote_files.model_folder(dataset.plan.tokenizer, "tokenizer")
        content = latent_page.page(dataset, index, chosen, folder / "tokenizer.json")
        Path(page).write_text(content, encoding="utf-8")


@click.command(epilog=example_epilog("tpu extract export acts activations-hf"))
@click.argument("out")
@click.argument("folder")
@click.option(
    "--site", help="Such as resid_post, for all layers, or resid_post.8.  [default: all sites]"
)
def export(out: str, folder: str, site: str | None) -> None:
    """Export the samples of OUT that are committed so far to Parquet files.

    FOLDER, a path, gs://… or s3://…, becomes a dataset repository with a row for each token, for
    `datasets.load_dataset(FOLDER)`, or in a bucket
    `datasets.load_dataset("parquet", data_files="FOLDER/data/*.parquet")`.
    """
    from tpufleet_activations.io import parquet_export

    dataset, target = datasets.open_dataset(out), open_storage(folder)
    with translate_disk_errors(target, EXPORT_AGAIN):
        exported = parquet_export.export_parquet(dataset, target, sites=[site] if site else [])
    others = exported["without_rows"]
    click.echo(
        f"{exported['rows']:,} rows of {format_count(exported['samples'], 'sample')} in "
        f"{format_count(exported['files'], 'Parquet file')}"
        + (f"; {format_count(others, 'sample')} without rows, such as skipped" if others else "")
        + f"\n  next: {_use_of_export(folder)}"
    )


EXPORT_AGAIN = "the export is incomplete; delete its folder, and export again"


def _use_of_export(folder: str) -> str:
    """The commands of Hugging Face take no buckets."""
    if package := {"gs": "gcsfs", "s3": "s3fs"}.get(urlsplit(folder).scheme):
        files = f"{folder.rstrip('/')}/data/train-*.parquet"
        return f"`datasets.load_dataset('parquet', data_files={files!r})`, which needs {package}"
    return (
        f"`datasets.load_dataset({folder!r})`, or "
        f"`hf upload NAME {shlex.quote(folder)} --repo-type dataset`"
    )
