"""`tpu extract plan`: estimate an extraction and write its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tpufleet.errors import BadInput
from tpufleet.model.job.jobs import Capacity
from tpufleet_activations.cli.option_plugins import option_plugins
from tpufleet_activations.cli.parameter_types import COUNT, POSITIVE, json_option
from tpufleet_activations.formatting import example_epilog, extract_command
from tpufleet_activations.inputs import sources
from tpufleet_activations.inputs.kinds import other_kinds

# Options that are arguments of `make_plan` under the same name.
_PLAN_OPTIONS = (
    "encoder",
    "tokenizer",
    "dtype",
    "compute",
    "compression",
    "max_length",
    "too_long",
    "stride",
    "keep",
    "batching",
    "batch_tokens",
    "exact",
)

# Options that are keys of a plan's `data` under the same name.
_DATA_OPTIONS = ("text_field", "id_field", "split", "max_samples")


@click.command(
    epilog=example_epilog("tpu extract plan acts --model Qwen/Qwen2.5-0.5B --data prompts.jsonl")
)
@click.argument("out")
@click.option(
    "--model",
    required=True,
    help="Folder, gs:// or s3:// prefix, or Hugging Face Hub name: NAME or NAME@COMMIT.",
)
@click.option("--data", required=True, help="File, folder, glob, gs:// or s3:// path.")
@click.option(
    "--kind",
    type=click.Choice(sources.kind_names()),
    help="Format of the data.  [default: detected]",
)
@click.option(
    "--site",
    "sites",
    multiple=True,
    help="Such as mlp_out.3 or resid_post.[4,8]; repeatable.  [default: resid_post.*]",
)
@click.option(
    "--encode",
    "encoder",
    help="File with a TopK autoencoder, whose latents are stored instead of the --site.",
)
@click.option("--tokenizer", help="Location of the tokenizer, if not in the model folder.")
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "f32"]),
    default="bf16",
    show_default=True,
    help="Data type of stored activations.",
)
@click.option(
    "--compute",
    type=click.Choice(["bf16", "f32"]),
    default="bf16",
    show_default=True,
    help="Data type of the forward pass.",
)
@click.option(
    "--compression", type=click.Choice(["none", "zstd"]), default="none", show_default=True
)
@click.option(
    "--max-length", type=COUNT, default=2048, show_default=True, help="Maximum tokens per sample."
)
@click.option(
    "--too-long",
    type=click.Choice(["skip", "cut", "split", "refuse", "concat"]),
    default="skip",
    show_default=True,
    help="Skip longer samples, cut them to --max-length, split them into contexts, or fail; "
    "concat: join all samples, and split the whole.",
)
@click.option(
    "--stride",
    type=COUNT,
    help="Tokens from one context to the next, with --too-long split.  [default: half of "
    "--max-length]",
)
@click.option(
    "--keep",
    type=click.Choice(["all", "no-special", "answer", "last"]),
    default="all",
    show_default=True,
    help="Tokens to store: all, none of the special ones, the last answer of a conversation, or "
    "the last token.",
)
@click.option(
    "--batching",
    type=click.Choice(["auto", "bucket", "pack"]),
    default="auto",
    show_default=True,
    help="Batch samples of similar length, or pack several into a row; auto: pack on GPUs.",
)
@click.option(
    "--batch-tokens",
    type=COUNT,
    help="Tokens per batch.  [default: 32768, less for small datasets]",
)
@click.option(
    "--shard-gb", type=POSITIVE, default=1.0, show_default=True, help="Maximum size of a shard."
)
@click.option("--text-field", help="Field with text, messages or tokens; may be a.b.")
@click.option(
    "--id-field",
    help="Field with the sample id; ids need not be unique.  [default: id, else task_id, else the "
    "index of the sample]",
)
@click.option("--split", help="Split of the data; `file`: each text file is one sample.")
@click.option("--max-samples", type=COUNT, help="Use only the first N samples.")
@click.option(
    "--data-option",
    "data_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Of a kind of data that another distribution reads; repeatable.",
)
@click.option("--exact", is_flag=True, help="Tokenize every sample instead of estimating.")
@click.option("--chips", help="TPU type for the estimate, such as v5e-16.")
@click.option(
    "--capacity",
    type=click.Choice([kind.value for kind in Capacity]),
    default=Capacity.ON_DEMAND.value,
    show_default=True,
    help="Capacity type for the price.",
)
@click.option("--max-gb", type=POSITIVE, help="Fail if the output would be larger.")
@click.option("--max-hours", type=POSITIVE, help="Fail if the run would take longer.")
@click.option("--max-cost", type=POSITIVE, help="Fail if the run would cost more, in dollars.")
@click.option("--dry-run", is_flag=True, help="Print the estimate, write no plan.")
@json_option
@click.pass_context
def plan(context: click.Context, out: str, **options: Any) -> None:
    """Estimate an extraction, and write its plan to OUT."""
    from tpufleet_activations import plans
    from tpufleet_activations.cli import output
    from tpufleet_activations.io.addresses import open_storage
    from tpufleet_activations.io.storage import translate_disk_errors
    from tpufleet_activations.pipeline import planning

    for plugin in option_plugins():
        plugin.apply(options)
    path = options["data"] if "://" in options["data"] else str(Path(options["data"]).absolute())
    kind = options["kind"] or sources.detect_kind(path)
    data = {name: options[name] for name in _DATA_OPTIONS if options[name] not in (None, False)}
    data |= {"kind": kind, "path": path, **_data_options(kind, options["data_options"])}
    chips = price = None
    if options["chips"]:
        from tpufleet.model.tpu import type_lookup

        accelerator = type_lookup.find(options["chips"])
        chips = (accelerator.generation, accelerator.chips)
        price = _price(accelerator.generation, options["capacity"])
    storage = None if options["dry_run"] else open_storage(out)
    if storage is not None:
        plans.check_free(storage)
    local = Path(options["model"]).is_dir()
    new_plan = planning.make_plan(
        model=str(Path(options["model"]).absolute()) if local else options["model"],
        data=data,
        choices=options["sites"] or ["resid_post.*"],
        shard_bytes=int(options["shard_gb"] * 2**30),
        chips=chips,
        price=price,
        **{name: options[name] for name in _PLAN_OPTIONS},
    )
    if others := sources.unused_splits(data):
        click.echo(
            f"using the split train; choose another with --split: {', '.join(others)}", err=True
        )
    budget = planning.PlanLimits(
        bytes=None if options["max_gb"] is None else options["max_gb"] * 1e9,
        hours=options["max_hours"],
        cost=options["max_cost"],
    )
    stored = None
    try:  # the plan is written first: the reader of the output may close it after a few lines
        budget.check(planning.Estimate(**new_plan.estimate))
        if storage is not None:
            again = "no plan was written; run the same command again afterwards"
            with translate_disk_errors(storage, again):
                stored = plans.write(storage, new_plan)
    finally:
        output.show_plan(new_plan, as_json=options["as_json"])
        default = context.get_parameter_source("max_length") is click.core.ParameterSource.DEFAULT
        output.warn_of_positions(new_plan, chosen=not default)
    if stored is new_plan:
        command = extract_command("run", out)
        click.echo(f"plan written; run it with {command}", err=options["as_json"])
    elif stored is not None:
        output.show_existing(open_storage(out), out, as_json=options["as_json"])


for _plugin in option_plugins():
    plan.params.extend(_plugin.plan_options)


def _data_options(kind: str, assignments: tuple[str, ...]) -> dict[str, str]:
    known = other_kinds()[kind].options if kind in other_kinds() else frozenset()
    options = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or name not in known:
            raise BadInput(
                f"--data-option {assignment}: {kind} data has "
                + (f"the options {', '.join(sorted(known))}" if known else "no such options")
            )
        options[name] = value
    return options


def _price(generation: str, capacity: str) -> float | None:
    """Dollars per hour of one chip; None if no price is known."""
    from tpufleet.model.tpu import prices
    from tpufleet.views.cli import connection

    price = prices.price_table(connection.settings().prices).get((generation, capacity))
    return None if price is None else price.usd
