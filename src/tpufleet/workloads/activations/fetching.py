"""Bringing models and data to this machine, when they lie in a bucket or on the hub."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from urllib.parse import urlsplit

from tpufleet.errors import BadInput, NotFound
from tpufleet.workloads.activations.storage import Storage, open_storage

PIECE = 64 << 20
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tpufleet" / "fetched"


def fetch(path: str) -> Path:
    """A local path as it is; a bucket's object, or all objects below a prefix, as local copies."""
    parts = urlsplit(path)
    if parts.scheme not in ("gs", "s3"):
        return Path(parts.path if parts.scheme == "file" else path)
    folder, _, name = path.rpartition("/")
    target = cache() / hashlib.sha256(path.encode()).hexdigest()[:16]
    parent = open_storage(folder)
    if name and name in parent.names(name):
        return _copy(parent, name, target / name)
    inside = open_storage(path)
    names = [entry for entry in inside.names("") if "/" not in entry]
    if not names:
        raise NotFound(f"nothing at {path}")
    for entry in names:
        _copy(inside, entry, target / entry)
    return target


def model_folder(model: str) -> Path:
    """The folder of a model: a path, a bucket's prefix, or a name on the Hugging Face hub."""
    place = fetch(model)
    if (place / "config.json").exists():
        return place
    if place.exists():
        raise BadInput(f"{model} has no config.json")
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise NotFound(f"no model at {model}")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=MODEL_FILES))
    except (OSError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise NotFound(f"no folder {model}, and the hub does not give it: {error}") from error


def _copy(storage: Storage, name: str, target: Path) -> Path:
    size = storage.size(name)
    if target.exists() and target.stat().st_size == size:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    with open(draft, "wb") as file:
        for start in range(0, size, PIECE):
            file.write(storage.read_range(name, start, min(PIECE, size - start)))
    os.replace(draft, target)
    return target
