"""`tpu extract plan`: what an extraction will take, before anything is spent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from tpufleet.errors import BadInput
from tpufleet.workloads.activations.exchanging import example_epilog

COUNT, POSITIVE = click.IntRange(1), click.FloatRange(0, min_open=True)
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


@click.command(
    epilog=example_epilog("tpu extract plan acts --model Qwen/Qwen2.5-0.5B --data prompts.jsonl")
)
@click.argument("out")
@click.option("--model", required=True, help="Folder, gs:// or s3:// prefix, or hub name.")
@click.option("--data", required=True, help="File, folder, glob, gs:// or s3:// path.")
@click.option(
    "--kind",
    type=click.Choice(["jsonl", "parquet", "hf", "text", "arc"]),
    help="What the data is. Guessed when left out.",
)
@click.option(
    "--site",
    "sites",
    multiple=True,
    help="Such as mlp_out.3 or resid_post.[4,8]; may be repeated.  [default: resid_post.*]",
)
@click.option(
    "--activation-type",
    type=click.Choice(["residual", "mlp", "attn"]),
    help="A site by its former name, of all layers or of --layers.",
)
@click.option("--layers", help='For --activation-type: "0 5 11" or 0-23.')
@click.option("--tokenizer", help="Where the tokenizer lies, if not beside the model.")
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "f16", "f32", "int8"]),
    default="bf16",
    show_default=True,
    help="As what activations are stored.",
)
@click.option(
    "--compression", type=click.Choice(["none", "zstd"]), default="none", show_default=True
)
@click.option(
    "--max-length", type=COUNT, default=2048, show_default=True, help="Most tokens of a sample."
)
@click.option(
    "--too-long",
    type=click.Choice(["skip", "cut", "refuse"]),
    default="skip",
    show_default=True,
    help="What becomes of a longer one.",
)
@click.option(
    "--batching",
    type=click.Choice(["bucket", "pack"]),
    default="bucket",
    show_default=True,
    help="Samples sorted by length, or packed side by side.",
)
@click.option(
    "--batch-tokens", type=COUNT, default=16384, show_default=True, help="Tokens run at once."
)
@click.option(
    "--shard-gb", type=POSITIVE, default=1.0, show_default=True, help="Size that units are cut for."
)
@click.option("--seed", default=42, show_default=True, help="Of augmentations.")
@click.option("--text-field", help="Where the text is.  [default: text, else prompt]")
@click.option("--id-field", help="Where a sample's own id is.  [default: id, else task_id]")
@click.option("--split", help="Of a saved dataset; or `file`, for text files taken whole.")
@click.option("--max-samples", type=COUNT, help="Use only the first samples.")
@click.option("--max-tasks", type=COUNT, help="ARC: use only the first tasks.")
@click.option("--grid-encoder", help="ARC: such as GridShapeEncoder(MinimalGridEncoder()).")
@click.option("--prompt-version", help="ARC: such as output-from-examples-v0.")
@click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="ARC: words of your own (TOML: system, user, answer).",
)
@click.option("--predictions-per-task", type=COUNT, help="ARC: augmentations of each test.")
@click.option("--streams", help="ARC, of a former stream manifest: only these, as in 0-7.")
@click.option("--skip-completed", is_flag=True, help="ARC: not those that it calls completed.")
@click.option("--exact", is_flag=True, help="Count every token instead of estimating.")
@click.option("--chips", help="A TPU type to reckon with, such as v5e-16.")
@click.option("--rate", type=POSITIVE, help="Measured tokens a second of the whole fleet.")
@click.option("--capacity", default="on-demand", show_default=True, help="Whose price to reckon.")
@click.option(
    "--price",
    type=click.FloatRange(0),
    help="Dollars an hour for a chip (or, with --rate, for all).",
)
@click.option("--max-gb", type=float, help="Refuse a larger output.")
@click.option("--max-hours", type=float, help="Refuse a longer run.")
@click.option("--max-cost", type=float, help="Refuse a dearer run, in dollars.")
@click.option("--dry-run", is_flag=True, help="Only print; write no plan.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_obj
def plan(prices: Any, out: str, **options: Any) -> None:
    """Say what an extraction will take, and write its plan to OUT."""
    from tpufleet.workloads.activations import inputs, plans, screens
    from tpufleet.workloads.activations.io.storage import open_storage
    from tpufleet.workloads.activations.pipeline import planning

    fields = ("text_field", "id_field", "split", "max_samples", "max_tasks")
    arc = ("grid_encoder", "prompt_version", "predictions_per_task", "streams", "skip_completed")
    data = {name: options[name] for name in (*fields, *arc) if options[name] not in (None, False)}
    if options["prompt_file"]:
        from tpufleet.workloads.activations.arc import templates

        data["prompt"] = templates.read_template(options["prompt_file"])
    path = options["data"] if "://" in options["data"] else str(Path(options["data"]).absolute())
    data |= {"kind": options["kind"] or inputs.detect_kind(path), "path": path}
    if options["price"] is None and options["chips"] and prices is not None:
        # Only the top layer knows what chips cost.
        options["price"] = prices(options["chips"], options["capacity"])
    storage = None if options["dry_run"] else open_storage(out)  # fails early, if it does
    local = Path(options["model"]).is_dir()
    made = planning.make_plan(
        model=str(Path(options["model"]).absolute()) if local else options["model"],
        data=data,
        choices=_sites(options["sites"], options["activation_type"], options["layers"]),
        shard_bytes=int(options["shard_gb"] * 2**30),
        **{name: options[name] for name in _PLANNED},
    )
    screens.show_plan(made, as_json=options["as_json"])
    limits = planning.Budget(
        bytes=None if options["max_gb"] is None else options["max_gb"] * 1e9,
        hours=options["max_hours"],
        cost=options["max_cost"],
    )
    limits.check(planning.Estimate(**made.estimate))
    if storage is not None:
        plans.write(storage, made)
        click.echo(f"planned; run it with `tpu extract run {out}`", err=options["as_json"])


def _sites(asked: tuple[str, ...], kind: str | None, layers: str | None) -> list[str]:
    """Sites as they were named: `--activation-type mlp --layers "0 5"` is `mlp.[0,5]`."""
    if layers and not kind:
        kind = "residual"
    chosen = list(asked)
    if kind:
        wanted = re.sub(r"[\s,]+", ",", (layers or "").strip(" ,[]"))
        if re.search(r"[^\d,-]", wanted):
            raise BadInput(f'layers {layers!r}: write numbers, as in "0 5 11" or 0-23')
        chosen.append(f"{kind}.[{wanted}]" if wanted else f"{kind}.*")
    return chosen or ["resid_post.*"]
