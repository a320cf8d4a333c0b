"""Durable file operations for checkpoints and object stores in folders."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path


def list_names(folder: Path) -> list[str]:
    """Empty when the folder does not exist."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def write_durably(path: Path, data: bytes) -> None:
    """Write all or nothing, also across a power failure."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    publish(temporary, path)


def publish(source: Path, destination: Path) -> None:
    """Rename atomically and durably."""
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
    """Rename the folder out of the way first, so that a partly deleted one is never read."""
    hidden = folder.with_name(f".trash-{os.getpid()}-{folder.name.lstrip('.')}")
    try:
        os.rename(folder, hidden)
    except FileNotFoundError:
        return
    shutil.rmtree(hidden, ignore_errors=True)


def list_files(folder: Path) -> list[Path]:
    """Every file below the folder, sorted by path."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
