"""Where the former scripts kept ARC tasks: stream manifests, and folders of shards and chunks.

A manifest is `{total_streams, dataset_dir, streams: {"0": {status, dataset_path, …}}}`; a sharded
folder has `master_metadata.json` and `shard_NNN/chunk_NNNN.jsonl`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tpufleet.errors import BadInput, NotFound
from tpufleet.workloads.activations.io.remote_files import fetch

MASTER_METADATA = "master_metadata.json"
COMPLETED = "completed"


def is_manifest(path: Path) -> bool:
    return path.suffix == ".json" and path.is_file() and _manifest(path) is not None


def stream_files(
    path: Path, *, streams: str | None = None, skip_completed: bool = False
) -> list[Path]:
    """The streams of a manifest in the order of their numbers, or those from `0-7` of them.

    What it calls completed is taken too unless it is to be skipped: a former run could call a
    stream completed that it had never read.
    """
    manifest = _manifest(path)
    assert manifest is not None
    wanted = parse_stream_range(streams) if streams else None
    chosen = [
        entry
        for number, entry in sorted(manifest["streams"].items(), key=lambda item: int(item[0]))
        if (wanted is None or int(number) in wanted)
        and not (skip_completed and entry.get("status") == COMPLETED)
    ]
    if not chosen:
        raise NotFound(f"{path} has no such streams; it has {len(manifest['streams'])}")
    return [_located(entry["dataset_path"], manifest, path) for entry in chosen]


def parse_stream_range(text: str) -> range:
    """`0-7` or `3`, both ends included."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise BadInput(f"streams {text!r}: write the first and the last, as in 0-7")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def sharded_files(folder: Path) -> list[Path]:
    """The chunks of a sharded folder, shard by shard."""
    found = []
    for entry in _json(folder / MASTER_METADATA).get("shards", ()):
        shard = folder / entry.get("directory", f"shard_{entry['shard_id']:03d}")
        facts = _json(shard / "metadata.json")
        found += [shard / chunk["file"] for chunk in facts.get("chunks", ())]
    missing = [path for path in found if not path.is_file()]
    if missing or not found:
        raise NotFound(f"{folder} lacks chunks that its metadata names: {missing[:3]}")
    return found


def build_manifest(
    streams: Mapping[int, Mapping[str, Any]],
    folder: str,
    created: str | None,
    updated: str | None,
) -> dict[str, Any]:
    """A manifest as it was written formerly."""
    return {
        "total_streams": len(streams),
        "dataset_dir": folder,
        "created_at": created,
        "updated_at": updated,
        "streams": {str(number): dict(entry) for number, entry in sorted(streams.items())},
    }


def _located(address: str, manifest: Mapping[str, Any], path: Path) -> Path:
    if urlsplit(address).scheme:
        return fetch(address)
    folder = manifest.get("dataset_dir") or "."
    if urlsplit(folder).scheme:
        return fetch(f"{folder.rstrip('/')}/{Path(address).name}")
    bases = (Path(), path.parent / folder, Path(folder), path.parent)
    places = [base / name for base in bases for name in (address, Path(address).name)]
    for place in places:
        if place.is_file():
            return place
    raise NotFound(f"{path} names the stream {address}, which is not there")


def _manifest(path: Path) -> Mapping[str, Any] | None:
    try:
        body = json.loads(path.read_text())
    except ValueError:
        return None
    if not isinstance(body, dict) or not isinstance(body.get("streams"), dict):
        return None
    entries = body["streams"]
    if not all(
        key.isdecimal() and isinstance(entry, dict) and "dataset_path" in entry
        for key, entry in entries.items()
    ):
        return None
    return body


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
