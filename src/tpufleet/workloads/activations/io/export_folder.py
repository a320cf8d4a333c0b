"""The folder of an export, which may be replaced by a later export of the same dataset only."""

from __future__ import annotations

import json
from collections.abc import Callable

from tpufleet.errors import Conflict, NotFound
from tpufleet.workloads.activations.io.storage import Storage
from tpufleet.workloads.activations.plans import ExtractionPlan

# Written before the first file, so that an interrupted export can be repeated.
MARKER = ".tpufleet-export.json"


def take(
    target: Storage,
    plan: ExtractionPlan,
    kind: str,
    *,
    replaces: Callable[[str], bool] = lambda name: True,
) -> None:
    """Mark a folder as that of an export, or raise Conflict if it holds other files. `replaces`
    says which names an export would delete or overwrite."""
    own = {"plan": plan.identity, "format": kind}
    try:
        marked = json.loads(target.read(MARKER))
    except (NotFound, ValueError):
        marked = None
    if marked == own:
        return
    files = [name for name in target.names("") if replaces(name) and name != MARKER]
    if files:
        raise Conflict(
            f"{target.url} holds {files[0]}, which is not of an earlier export of this dataset; "
            "choose an empty folder"
        )
    target.replace(MARKER, json.dumps(own).encode())
