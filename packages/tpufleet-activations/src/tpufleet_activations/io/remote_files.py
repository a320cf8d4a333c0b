"""Local copies of models and data from buckets and the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tpufleet.errors import BadInput, Conflict, FleetError, NotFound, missing
from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.io.storage import Storage, read_exactly

PIECE = 32 << 20
READERS = 8  # pieces downloaded concurrently
COPY_TRIES = 5  # of an object that is replaced while it is downloaded, or arrives damaged
MODEL_FILES = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "tokenizer.model",
]
COMMIT = re.compile("[0-9a-f]{40}")
DATA_SUFFIXES = (".parquet", ".jsonl")
DATA_FILES = [f"*{suffix}" for suffix in DATA_SUFFIXES]


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tpufleet" / "fetched"


def fetch(path: str, *, recursive: bool = False, patterns: Sequence[str] = ("*",)) -> Path:
    """The local path of `path`: itself, or for an object or prefix in a bucket, a local copy.

    `patterns` selects names: of sub-folders only those that a pattern contains, or all of them with
    `recursive`.
    """

    def selected(entry: str) -> bool:
        return any(
            fnmatch(entry, pattern) and (recursive or entry.count("/") == pattern.count("/"))
            for pattern in patterns
        )

    parts = urlsplit(path)
    if parts.scheme not in ("gs", "s3"):
        return Path(parts.path if parts.scheme == "file" else path)
    folder, _, name = path.rpartition("/")
    target = cache_folder() / hashlib.sha256(path.encode()).hexdigest()[:16]
    if name and parts.path:  # not a whole bucket
        parent = open_storage(folder)
        if name in parent.names(name):
            return copy_object(parent, name, target / name)
    storage = open_storage(path)
    names = list(filter(selected, _file_names(storage)))
    if not names:
        raise missing(path)
    for entry in names:
        if entry.startswith("/") or ".." in entry.split("/"):
            raise BadInput(f"{storage.url}/{entry} cannot be copied: its name is not a file path")
    for entry in names:
        copy_object(storage, entry, target / entry)
    # Objects that were deleted from the bucket are deleted from the cache too.
    for cached in target.rglob("[!.]*"):
        entry = str(cached.relative_to(target))
        if cached.is_file() and entry not in names and selected(entry):
            cached.unlink(missing_ok=True)
    return target


def _file_names(storage: Storage) -> list[str]:
    """The names below a prefix, without the empty objects that consoles create as folders."""
    return [name for name in storage.names("") if name and not name.endswith("/")]


def list_names(path: str) -> set[str]:
    """Names of the files directly in a folder or bucket prefix."""
    parts = urlsplit(path)
    if parts.scheme in ("gs", "s3"):
        return {name for name in _file_names(open_storage(path)) if "/" not in name}
    folder = fetch(path)
    return {file.name for file in folder.iterdir()} if folder.is_dir() else set()


def model_folder(model: str, what: str = "model") -> Path:
    """The local folder of a model: a path, a bucket prefix, or a name on the Hugging Face Hub.

    `what` it is called in errors.
    """
    folder = fetch(model, patterns=MODEL_FILES)
    if (folder / "config.json").exists():
        return folder
    if folder.exists():
        raise missing(f"{model}/config.json")
    if not _may_be_on_hub(model):
        raise NotFound(f"no {what} at {model}")
    return _from_hub(model, allow_patterns=MODEL_FILES)


def dataset_folder(dataset: str) -> Path:
    """The local folder of a dataset: a path, bucket prefix, or name on the Hugging Face Hub."""
    local = fetch(dataset, recursive=True)
    if local.exists():
        return local
    if not _may_be_on_hub(dataset):
        raise missing(dataset)
    return _from_hub(dataset, repo_type="dataset", allow_patterns=DATA_FILES)


def data_folders(path: str) -> list[str]:
    """The sub-folders of a folder or bucket prefix that hold data files, as those of a repository
    of the Hugging Face Hub."""
    if urlsplit(path).scheme in ("gs", "s3"):
        names = _file_names(open_storage(path))
    else:
        folder = fetch(path)
        names = [str(file.relative_to(folder)) for file in folder.glob("[!.]*/[!.]*")]
    nested = (name.split("/") for name in names if name.endswith(DATA_SUFFIXES))
    return sorted({parts[0] for parts in nested if len(parts) == 2})


def _may_be_on_hub(name: str) -> bool:
    return name.partition("@")[0].count("/") == 1 and not name.startswith((".", "/", "~"))


def _from_hub(name: str, **options: Any) -> Path:
    """A snapshot of NAME, or of NAME@COMMIT. A branch is not accepted: it is in the plan, and would
    be another commit for later workers."""
    import huggingface_hub

    repository, at, commit = name.partition("@")
    if at and not COMMIT.fullmatch(commit):
        raise _not_on_hub(name, f"{commit!r} is not a commit, of 40 hexadecimal digits")
    try:
        snapshot = huggingface_hub.snapshot_download(repository, revision=commit or None, **options)
        return Path(snapshot)
    except (
        OSError,
        huggingface_hub.errors.HFValidationError,
        huggingface_hub.errors.HfHubHTTPError,
    ) as error:
        raise _not_on_hub(name, error) from error


def _not_on_hub(name: str, reason: object) -> NotFound:
    return NotFound(
        f"{name} is neither a folder here nor a name on the Hugging Face Hub, such as "
        f"Qwen/Qwen2.5-0.5B or NAME@COMMIT: {reason}"
    )


def copy_object(storage: Storage, name: str, target: Path) -> Path:
    """A local copy of one version of the object, refreshed when that has changed."""
    stamp = target.with_name(f".{target.name}.version")
    for _ in range(COPY_TRIES):
        # Read before everything else of the object, and again after it.
        version = storage.version(name)
        size = storage.size(name)
        if target.exists() and stamp.exists() and stamp.read_text() == f"{size} {version}":
            return target
        _make_folder(target.parent)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            try:
                _download(storage, name, size, draft)
            except FleetError:
                # An object that has become shorter lacks the rest of its ranges.
                if storage.version(name) == version:
                    raise
                continue
            expected = storage.checksum(name)
            checked = file_checksum(expected.partition(":")[0], draft) if expected else ""
            if storage.version(name) != version or checked != expected:
                continue
            stamp.unlink(missing_ok=True)
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)
        stamp.write_text(f"{size} {version}")
        return target
    raise Conflict(
        f"{storage.url}/{name} was replaced, or differed from its checksum, in each of "
        f"{COPY_TRIES} downloads; run again when it is no longer written"
    )


def _download(storage: Storage, name: str, size: int, draft: Path) -> None:
    def piece(start: int) -> None:
        data = read_exactly(storage, name, start, min(PIECE, size - start))
        os.pwrite(file.fileno(), data, start)

    with open(draft, "wb") as file, ThreadPoolExecutor(READERS) as readers:
        list(readers.map(piece, range(0, size, PIECE)))


def file_checksum(algorithm: str, path: Path) -> str:
    """In the form of `Storage.checksum`."""
    kind, _, part = algorithm.partition("/")
    whole, size = _checksum(kind), path.stat().st_size
    with open(path, "rb") as file:
        for start in range(0, size, int(part or size or 1)):
            checksum = _checksum(kind) if part else whole
            stop = min(start + int(part or size), size)
            while left := stop - file.tell():
                checksum.update(file.read(min(PIECE, left)))
            if part:
                whole.update(checksum.digest())
    return f"{algorithm}:{whole.digest().hex()}"


def _checksum(kind: str) -> Any:
    if kind == "crc32c":
        import google_crc32c

        return google_crc32c.Checksum()
    return _Crc32() if kind == "crc32" else hashlib.new(kind, usedforsecurity=False)


class _Crc32:
    """As one of hashlib."""

    _value = 0

    def update(self, data: bytes) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


def _make_folder(folder: Path) -> None:
    """In the place of cached objects that have become folders, too."""
    for path in (folder, *folder.parents):
        if path == cache_folder():
            break
        if path.is_file():
            path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
