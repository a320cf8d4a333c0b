"""The folder of an export, which may be replaced by a later export of the same dataset only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tpufleet.errors import Conflict, NotFound
from tpufleet.runtime.bucket_urls import split_bucket_url
from tpufleet_activations import plans
from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.io.storage import LocalFolder, Storage

# Written before the first file, so that an interrupted export can be repeated.
MARKER = ".tpufleet-export.json"


def take(
    target: Storage,
    plan: plans.ExtractionPlan,
    kind: str,
    *,
    replaces: Callable[[str], bool] = lambda name: True,
) -> None:
    """Mark a folder as that of an export, or raise Conflict if it holds other files, another
    export or a dataset, or is inside one. `replaces` says which names an export would delete or
    overwrite."""
    _check_outside_datasets(target)
    own = {"plan": plan.identity, "format": kind}
    marked = _read_marker(target)
    if marked == own:
        return
    files = [name for name in target.names("") if name != MARKER]
    if marked and files:
        owner = "this" if marked.get("plan") == plan.identity else "another"
        raise _occupied(target, f"an export of {owner} dataset as {marked.get('format')}")
    replaced = [name for name in files if replaces(name)]
    if replaced:
        raise _occupied(target, f"{replaced[0]}, which is not of an earlier export")
    target.replace(MARKER, json.dumps(own).encode())


def _check_outside_datasets(target: Storage) -> None:
    for folder in (target, *_parents(target)):
        if plans.holds_dataset(folder):
            raise _occupied(folder, "a dataset")


def _occupied(target: Storage, content: str) -> Conflict:
    return Conflict(f"{target.url} holds {content}; choose an empty folder outside of it")


def _parents(target: Storage) -> Iterator[Storage]:
    if isinstance(target, LocalFolder):
        yield from (LocalFolder(path) for path in target.path.resolve().parents)
        return
    scheme, bucket, name = split_bucket_url(target.url)
    for path in Path(f"/{name}").parents:
        yield open_storage(f"{scheme}://{bucket}{path}")


def _read_marker(folder: Storage) -> dict[str, Any]:
    """Empty if there is none, or one of another program."""
    try:
        body = json.loads(folder.read(MARKER))
    except (NotFound, ValueError):
        return {}
    return body if isinstance(body, dict) else {}
