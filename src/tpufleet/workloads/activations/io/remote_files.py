"""Bringing models and data to this machine, when they lie in a bucket or on the hub."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tpufleet.errors import BadInput, NotFound
from tpufleet.workloads.activations.io.storage import Storage, open_storage

PIECE = 32 << 20
READERS = 8  # pieces that are read at once
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
DATA_ENDINGS = (".parquet", ".jsonl")
DATA_FILES = [f"*{ending}" for ending in DATA_ENDINGS]


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tpufleet" / "fetched"


def fetch(path: str, *, recursive: bool = False, patterns: Sequence[str] = ("*",)) -> Path:
    """A local path as it is; a bucket's object, or the objects below a prefix, as local copies.
    `within` takes those in folders below it too; `only` takes those whose names fit a pattern."""
    parts = urlsplit(path)
    if parts.scheme not in ("gs", "s3"):
        return Path(parts.path if parts.scheme == "file" else path)
    folder, _, name = path.rpartition("/")
    target = cache_folder() / hashlib.sha256(path.encode()).hexdigest()[:16]
    parent = open_storage(folder)
    if name and name in parent.names(name):
        return _copy(parent, name, target / name)
    inside = open_storage(path)
    names = [
        entry
        for entry in inside.names("")
        if (recursive or "/" not in entry) and any(fnmatch(entry, pattern) for pattern in patterns)
    ]
    if not names:
        raise NotFound(f"nothing at {path}")
    for entry in names:
        _copy(inside, entry, target / entry)
    # What was deleted there must not be read here.
    for path in target.rglob("[!.]*") if recursive else target.glob("[!.]*"):
        if path.is_file() and str(path.relative_to(target)) not in names:
            path.unlink(missing_ok=True)
    return target


def list_names(path: str) -> set[str]:
    """The names of the files directly in a folder or below a bucket's prefix."""
    parts = urlsplit(path)
    if parts.scheme in ("gs", "s3"):
        return {name for name in open_storage(path).names("") if "/" not in name}
    folder = fetch(path)
    return {file.name for file in folder.iterdir()} if folder.is_dir() else set()


def model_folder(model: str) -> Path:
    """The folder of a model: a path, a bucket's prefix, or a name on the Hugging Face hub."""
    place = fetch(model, patterns=MODEL_FILES)
    if (place / "config.json").exists():
        return place
    if place.exists():
        raise BadInput(f"{model} has no config.json")
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise NotFound(f"no model at {model}")
    return _from_hub(model, allow_patterns=MODEL_FILES)


def dataset_folder(dataset: str) -> Path:
    """The files of a dataset: a path, a bucket's prefix, or a name on the Hugging Face hub."""
    place = fetch(dataset, recursive=True)
    if place.exists():
        return place
    if dataset.count("/") != 1 or dataset.startswith((".", "/", "~")):
        raise NotFound(f"no dataset at {dataset}")
    folder = _from_hub(dataset, repo_type="dataset", allow_patterns=DATA_FILES)
    inside = sorted({path.parent for path in folder.rglob("*") if path.suffix in DATA_ENDINGS})
    if len(inside) != 1:
        raise BadInput(f"{dataset} has {len(inside)} folders with data; name one that you fetched")
    return inside[0]


def _from_hub(name: str, **options: Any) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, **options))
    except (OSError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise NotFound(f"no folder {name}, and the hub does not give it: {error}") from error


def _copy(storage: Storage, name: str, target: Path) -> Path:
    """A local copy, made again when the object was written again."""
    size, version = storage.size(name), storage.version(name)
    stamp = target.with_name(f".{target.name}.version")
    if target.exists() and stamp.exists() and stamp.read_text() == f"{size} {version}":
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")

    def piece(start: int) -> None:
        data = storage.read_range(name, start, min(PIECE, size - start))
        os.pwrite(file.fileno(), data, start)

    try:
        with open(draft, "wb") as file, ThreadPoolExecutor(READERS) as readers:
            list(readers.map(piece, range(0, size, PIECE)))
        stamp.unlink(missing_ok=True)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    stamp.write_text(f"{size} {version}")
    return target
