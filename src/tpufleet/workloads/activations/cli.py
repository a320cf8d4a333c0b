"""`tpu extract`: plan, run, status, verify, export, import, streams."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from tpufleet.errors import FleetError

# Options that go to the plan under their own names.
_PLANNED = (
    "tokenizer",
    "dtype",
    "compression",
    "max_length",
    "too_long",
    "batching",
    "batch_tokens",
    "seed",
    "exact",
    "chips",
    "rate",
    "price",
)


class _Words(click.Group):
    """Errors that tpufleet raises on purpose are shown as words, not as tracebacks."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except FleetError as error:
            raise click.ClickException(str(error)) from error


def _example(line: str) -> str:
    return f"\b\nExample:\n  {line}\n"


def _dashes(word: str) -> str:
    """The former scripts wrote their options with underscores; both are understood."""
    return word.replace("_", "-")


@click.group(cls=_Words, context_settings={"token_normalize_func": _dashes})
def extract() -> None:
    """Extract activations from a language model, each sample exactly once."""


@extract.command(
    epilog=_example("tpu extract plan acts --model Qwen/Qwen2.5-0.5B --data prompts.jsonl")
)
@click.argument("out")
@click.option("--model", required=True, help="Folder, gs:// or s3:// prefix, or hub name.")
@click.option("--data", required=True, help="File, folder, glob, gs:// or s3:// path.")
@click.option("--kind", help="jsonl, parquet, hf, text or arc. Guessed when left out.")
@click.option("--site", "sites", multiple=True, default=["resid_post.*"], show_default=True)
@click.option("--tokenizer", help="Where the tokenizer lies, if not beside the model.")
@click.option("--dtype", default="bf16", show_default=True, help="bf16, f16, f32 or int8.")
@click.option("--compression", default="none", show_default=True, help="none or zstd.")
@click.option("--max-length", default=2048, show_default=True)
@click.option("--too-long", default="skip", show_default=True, help="skip, cut or refuse.")
@click.option("--batching", default="bucket", show_default=True, help="bucket or pack.")
@click.option("--batch-tokens", default=16384, show_default=True)
@click.option("--shard-gb", default=1.0, show_default=True, help="Size that units are cut for.")
@click.option("--seed", default=42, show_default=True)
@click.option("--text-field")
@click.option("--id-field")
@click.option("--split", help="Of a saved dataset; or `file`, for text files taken whole.")
@click.option("--max-samples", type=int)
@click.option("--max-tasks", type=int, help="ARC: use only the first tasks.")
@click.option("--grid-encoder", help="ARC: such as GridShapeEncoder(MinimalGridEncoder()).")
@click.option("--prompt-version", help="ARC: such as output-from-examples-v0.")
@click.option("--predictions-per-task", type=int, help="ARC: augmentations of each test.")
@click.option("--exact", is_flag=True, help="Count every token instead of estimating.")
@click.option("--chips", help="Chips to reckon with, such as v5e-16.")
@click.option("--rate", type=float, help="Measured tokens a second of the whole fleet.")
@click.option("--capacity", default="on-demand", show_default=True, help="Whose price to reckon.")
@click.option("--price", type=float, help="Dollars an hour for a chip (or, with --rate, for all).")
@click.option("--max-gb", type=float, help="Refuse a larger output.")
@click.option("--max-hours", type=float, help="Refuse a longer run.")
@click.option("--max-cost", type=float, help="Refuse a dearer run, in dollars.")
@click.option("--dry-run", is_flag=True, help="Only print; write no plan.")
@click.option("--json", "as_json", is_flag=True)
@click.pass_obj
def plan(prices: Any, out: str, **options: Any) -> None:
    """Say what an extraction will take, and write its plan to OUT."""
    from tpufleet.workloads.activations import inputs, planning, plans, screens
    from tpufleet.workloads.activations.storage import open_storage

    fields = ("text_field", "id_field", "split", "max_samples", "max_tasks")
    arc = ("grid_encoder", "prompt_version", "predictions_per_task")
    data = {name: options[name] for name in (*fields, *arc) if options[name] is not None}
    path = options["data"] if "://" in options["data"] else str(Path(options["data"]).absolute())
    data |= {"kind": options["kind"] or inputs.guess_kind(path), "path": path}
    if options["price"] is None and options["chips"] and prices is not None:
        # Only the top layer knows what chips cost.
        options["price"] = prices(options["chips"], options["capacity"])
    local = Path(options["model"]).is_dir()
    made = planning.make(
        model=str(Path(options["model"]).absolute()) if local else options["model"],
        data=data,
        choices=options["sites"],
        shard_bytes=int(options["shard_gb"] * 2**30),
        **{name: options[name] for name in _PLANNED},
    )
    screens.show_plan(made, as_json=options["as_json"])
    limits = planning.Budget(
        bytes=None if options["max_gb"] is None else options["max_gb"] * 2**30,
        hours=options["max_hours"],
        cost=options["max_cost"],
    )
    limits.check(planning.Estimate(**made.estimate))
    if not options["dry_run"]:
        plans.adopt(open_storage(out), made)
        click.echo(f"planned; run it with `tpu extract run {out}`", err=options["as_json"])


@extract.command(epilog=_example("tpu extract run acts"))
@click.argument("out")
@click.option("--model", help="Where the model lies on this machine, if not where it was planned.")
@click.option("--data", help="Where the data lies on this machine, likewise.")
@click.option("--mesh", default="", help="Such as data=2,fsdp=1,tensor=4. All devices: data.")
@click.option("--scope", default="local", show_default=True, help="local, or global over hosts.")
@click.option("--compute", default="bf16", show_default=True, help="bf16 or f32.")
@click.option(
    "--memory",
    default="auto",
    show_default=True,
    help="How activations come to the host: pinned (page-locked), plain, or auto.",
)
@click.option(
    "--lease", default=60.0, show_default=True, help="Seconds until a silent worker is given up."
)
@click.option("--steal-after", type=float, help="Seconds before a slow worker's unit is taken.")
@click.option("--preparers", default=0, show_default=True, help="Processes that tokenise.")
@click.option("--writers", default=8, show_default=True, help="Threads that hash and write.")
@click.option("--worker", default="", help="This worker's name, unique among the living.")
@click.option("--quiet", is_flag=True)
def run(out: str, **options: Any) -> None:
    """Work on the plan in OUT until it is done. Any number of workers may run this at once."""
    from tpufleet import runtime
    from tpufleet.workloads.activations import meshes, running, screens, workers
    from tpufleet.workloads.activations.storage import open_storage

    runtime.initialize()
    steal = options["steal_after"]
    settings = running.Settings(
        compute=options["compute"],
        mesh=meshes.parse(options["mesh"]),
        scope=options["scope"],
        memory=options["memory"],
        lease=timedelta(seconds=options["lease"]),
        steal_after=None if steal is None else timedelta(seconds=steal),
        name=options["worker"],
        options=workers.Options(preparers=options["preparers"], writers=options["writers"]),
    )
    screen = None if options["quiet"] else screens.Progress()
    meter = running.run(
        open_storage(out),
        settings,
        model=options["model"],
        data=options["data"],
        on_progress=screen,
    )
    screens.show_end(meter)


@extract.command(epilog=_example("tpu extract status acts --watch 5"))
@click.argument("outs", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True)
@click.option("--watch", type=float, help="Show it again after so many seconds, until all is done.")
def status(outs: tuple[str, ...], as_json: bool, watch: float | None) -> None:
    """How far datasets are, and who works on them."""
    from tpufleet.workloads.activations import screens
    from tpufleet.workloads.activations.storage import open_storage

    screens.watch_status({out: open_storage(out) for out in outs}, as_json=as_json, every=watch)


@extract.command(epilog=_example("tpu extract verify acts"))
@click.argument("out")
@click.option("--quick", is_flag=True, help="Records and sizes only; do not read the bytes.")
@click.option("--sweep", is_flag=True, help="Delete what dead workers left, if all is committed.")
@click.option("--json", "as_json", is_flag=True)
@click.pass_context
def verify(context: click.Context, out: str, quick: bool, sweep: bool, as_json: bool) -> None:
    """Prove that every sample is there once and every byte is as it was written."""
    from tpufleet.workloads.activations import screens, verifying
    from tpufleet.workloads.activations.storage import open_storage

    storage = open_storage(out)
    report = verifying.verify(storage, deep=not quick)
    screens.show_report(report, as_json=as_json)
    if sweep and report.whole:
        click.echo(f"deleted {len(verifying.sweep(storage))} leftovers", err=as_json)
    context.exit(0 if report.whole else 1)


@extract.command(epilog=_example("tpu extract export acts old-shards"))
@click.argument("out")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--site", default="resid_post", show_default=True)
@click.option("--shard-gb", default=1.0, show_default=True)
@click.option("--pad-to", type=int, help="Pad every sample with zeros to this many rows.")
@click.option("--no-compress", is_flag=True)
def export(
    out: str, folder: Path, site: str, shard_gb: float, pad_to: int | None, no_compress: bool
) -> None:
    """Write the dataset in OUT as former shards (shard_0001.pkl.gz) to FOLDER."""
    from tpufleet.workloads.activations import datasets, legacy

    facts = legacy.export(
        datasets.open_dataset(out),
        folder,
        site=site,
        shard_bytes=int(shard_gb * 2**30),
        pad_to=pad_to,
        compress=not no_compress,
    )
    click.echo(f"{facts['total_shards']} shards, {facts['total_unique_samples']} samples")


@extract.command("import", epilog=_example("tpu extract import old-shards acts"))
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.argument("out")
@click.option("--site", default="resid_post", show_default=True, help="What the shards hold.")
def take_in(folder: Path, out: str, site: str) -> None:
    """Make a dataset in OUT of a FOLDER of former shards."""
    from tpufleet.workloads.activations import legacy
    from tpufleet.workloads.activations.storage import open_storage

    made = legacy.take_in(folder, open_storage(out), site=site)
    click.echo(f"{made.samples} samples, {len(made.sites)} sites")


@extract.command(epilog=_example("tpu extract streams tasks.jsonl streams --streams 32"))
@click.argument("data")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--streams", "count", type=int, required=True)
@click.option("--column", default="examples", show_default=True)
@click.option("--max-samples", type=int, help="In all streams together.")
def streams(data: str, folder: Path, count: int, column: str, max_samples: int | None) -> None:
    """Cut a dataset of ARC pairs (Parquet, JSONL or saved to disk) into stream_NNN.jsonl files."""
    from tpufleet.workloads.activations import inputs
    from tpufleet.workloads.activations.arc import tasks

    rows = inputs.raw_records(data)
    done = tasks.write_streams(
        (row.get(column) for row in rows), count, folder, max_samples=max_samples
    )
    click.echo(json.dumps(done))

