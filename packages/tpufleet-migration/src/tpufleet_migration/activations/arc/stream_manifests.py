"""ARC task collections of the older scripts: stream manifests, and folders of shards and chunks.

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
from tpufleet_activations.input_errors import missing, unreadable
from tpufleet_activations.io.remote_files import fetch

MASTER_METADATA = "master_metadata.json"
COMPLETED = "completed"


def is_manifest(path: Path) -> bool:
    return path.suffix == ".json" and path.is_file() and _read_manifest(path) is not None


def stream_files(
    path: Path, *, streams: str | None = None, skip_completed: bool = False
) -> list[Path]:
    """The stream files of a manifest by number; `streams` selects a range such as `0-7`.

    Completed streams are included by default: the older scripts could mark a stream completed
    without reading it.
    """
    manifest = _read_manifest(path)
    assert manifest is not None
    wanted = parse_stream_range(streams) if streams else None
    selected = [
        entry
        for number, entry in sorted(manifest["streams"].items(), key=lambda item: int(item[0]))
        if (wanted is None or int(number) in wanted)
        and not (skip_completed and entry.get("status") == COMPLETED)
    ]
    if not selected:
        raise NotFound(f"no matching streams in {path}, which has {len(manifest['streams'])}")
    return [_locate(entry["dataset_path"], manifest, path) for entry in selected]


def parse_stream_range(text: str) -> range:
    """`0-7` or `3`; both ends are included."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise BadInput(f"invalid stream range {text!r}; expected FIRST-LAST, such as 0-7")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def sharded_files(folder: Path) -> list[Path]:
    """The chunk files of a sharded folder, in order."""
    chunks: list[Path] = []
    for entry in _read_json(folder / MASTER_METADATA).get("shards", ()):
        shard = folder / entry.get("directory", f"shard_{entry['shard_id']:03d}")
        metadata = _read_json(shard / "metadata.json")
        chunks += [shard / chunk["file"] for chunk in metadata.get("chunks", ())]
    for path in chunks:
        if not path.is_file():
            raise missing(path)
    if not chunks:
        raise unreadable(folder / MASTER_METADATA, "no chunks")
    return chunks


def _locate(stream: str, manifest: Mapping[str, Any], path: Path) -> Path:
    """Relative paths are tried against the working directory, `dataset_dir` and the manifest."""
    if urlsplit(stream).scheme:
        return fetch(stream)
    folder = manifest.get("dataset_dir") or "."
    if urlsplit(folder).scheme:
        return fetch(f"{folder.rstrip('/')}/{Path(stream).name}")
    bases = (Path(), path.parent / folder, Path(folder), path.parent)
    for candidate in (base / name for base in bases for name in (stream, Path(stream).name)):
        if candidate.is_file():
            return candidate
    raise missing(path.parent / stream)


def _read_manifest(path: Path) -> Mapping[str, Any] | None:
    """None if the file is not a stream manifest."""
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
