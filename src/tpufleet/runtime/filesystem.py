"""The few things that checkpoints need of a file system. An object store can take their place."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path


def list_names(folder: Path) -> list[str]:
    """What is in the folder; nothing when there is none."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def write_durably(path: Path, data: bytes) -> None:
    """All or nothing, also through a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    publish(temporary, path)


def publish(source: Path, destination: Path) -> None:
    """Rename, durably: the destination is there as a whole or not at all."""
    os.rename(source, destination)
    fsync(destination.parent)


def fsync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_folder(folder: Path) -> None:
    """Take a folder away. First out of sight, so that half of it is never mistaken for it."""
    hidden = folder.with_name(f".trash-{os.getpid()}-{folder.name.lstrip('.')}")
    try:
        os.rename(folder, hidden)
    except FileNotFoundError:
        return
    shutil.rmtree(hidden, ignore_errors=True)


def list_files(folder: Path) -> list[Path]:
    """Every file below, in order of path."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
