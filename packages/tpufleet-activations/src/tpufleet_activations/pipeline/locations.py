"""Where the model, tokenizer and data of an extraction are on this machine, resolved once.

Everything after this works on local paths, so a run looks up and downloads each of them once,
however many threads and processes tokenize.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpufleet.errors import NotFound
from tpufleet_activations.inputs import sources
from tpufleet_activations.io import remote_files
from tpufleet_activations.model import architectures
from tpufleet_activations.plans import ExtractionPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Locations:
    """Local paths, and the architecture from the model's config.json. Can be pickled."""

    model: Path
    architecture: architectures.Architecture
    tokenizer: Path
    data: sources.DataFiles


def resolve(*, model: str, tokenizer: str | None, data: Mapping[str, Any]) -> Locations:
    """`tokenizer` None: the model's own."""
    folder = remote_files.model_folder(model)
    return Locations(
        model=folder,
        architecture=architectures.from_folder(folder),
        tokenizer=remote_files.model_folder(tokenizer, "tokenizer") if tokenizer else folder,
        data=sources.resolve(data),
    )


def resolve_plan(
    plan: ExtractionPlan, *, model: str | None = None, data: str | None = None
) -> Locations:
    """The locations of a plan. `model` and `data` override where they were when planned."""
    tokenizer = None if plan.tokenizer == plan.model else plan.tokenizer
    described = plan.data if data is None else {**plan.data, "path": data}
    try:
        return resolve(model=model or plan.model, tokenizer=tokenizer, data=described)
    except NotFound as error:
        if model and data:
            raise
        raise NotFound(f"{error}\n  next: pass where it is now with --model or --data") from error
