"""Options of the former scripts, understood by `tpu extract`. They are hidden in its help, and
explained in docs/migration/activation-extraction.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from tpufleet.errors import invalid
from tpufleet_activations.cli.option_plugins import OptionPlugin

ACTIVATION_TYPES = {"residual": "resid_post", "mlp": "mlp_out", "attn": "attn_out"}
# Options that have another name now.
SPELLINGS = {
    "model-path": "model",
    "dataset-path": "data",
    "dataset-stream": "data",
    "max-seq-length": "max-length",
    "shard-size-gb": "shard-gb",
    "random-seed": "seed",
    "layers-to-extract": "layers",
    "num-streams": "streams",
    "column-name": "column",
    "no-compress-shards": "no-compress",
}
# Options of `plan` that are `--data-option`s of ARC data.
ARC_OPTIONS = (
    "max_tasks",
    "grid_encoder",
    "prompt_version",
    "predictions_per_task",
    "seed",
)
COUNT = click.IntRange(1)


def _spelling(name: str) -> str:
    """The former scripts spelled options with underscores."""
    name = name.replace("_", "-")
    return SPELLINGS.get(name, name)


def _option(name: str, **attributes: Any) -> click.Option:
    return click.Option([name], hidden=True, **attributes)


PLAN_OPTIONS = (
    _option("--activation-type", type=click.Choice(list(ACTIVATION_TYPES))),
    _option("--layers"),
    _option("--max-tasks", type=COUNT),
    _option("--grid-encoder"),
    _option("--prompt-version"),
    _option("--prompt-file", type=click.Path(exists=True, dir_okay=False, path_type=Path)),
    _option("--predictions-per-task", type=COUNT),
    _option("--seed", type=int),
)


def _apply(options: dict[str, Any]) -> None:
    chosen = {name: options.pop(name) for name in ARC_OPTIONS}
    assignments = [
        f"{name}={value}" for name, value in chosen.items() if value not in (None, False)
    ]
    if prompt_file := options.pop("prompt_file"):
        from tpufleet_migration.activations.arc import prompts

        assignments.append(f"prompt={json.dumps(prompts.read_template(prompt_file))}")
    options["data_options"] += tuple(assignments)
    kind, layers = options.pop("activation_type"), options.pop("layers")
    if kind or layers:
        options["sites"] += (_site(ACTIVATION_TYPES[kind or "residual"], layers or ""),)


def _site(site: str, layers: str) -> str:
    """`mlp_out` and `"0 5"` are `mlp_out.[0,5]`."""
    wanted = re.sub(r"[\s,]+", ",", layers.strip(" ,[]"))
    if re.search(r"[^\d,-]", wanted):
        raise invalid(layers, "a list of layers", '"0 5 11" or 0-23', "--layers")
    return f"{site}.[{wanted}]" if wanted else f"{site}.*"


OPTIONS = OptionPlugin(spelling=_spelling, plan_options=PLAN_OPTIONS, apply=_apply)
