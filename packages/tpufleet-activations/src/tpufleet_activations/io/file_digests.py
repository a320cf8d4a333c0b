"""Digests of whole files, remembered while a file does not change: weights are many gigabytes."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from tpufleet_activations.io.remote_files import cache_folder

# Within the resolution of a file's times it may be written again without a trace.
SETTLED_SECONDS = 2.0


def file_digest(path: Path, clock: Callable[[], float] = time.time) -> str:
    """BLAKE3 of all bytes."""
    path = path.resolve()
    version = file_version(path)
    name = hashlib.sha256(f"{path} {version}".encode()).hexdigest()
    record = cache_folder().parent / "digests" / name
    with suppress(OSError):  # there is none
        return record.read_text()
    digest = _hash(path)
    settled = clock() - path.stat().st_ctime > SETTLED_SECONDS
    if settled and file_version(path) == version:
        with suppress(OSError):  # it is hashed again the next time
            record.parent.mkdir(parents=True, exist_ok=True)
            draft = record.with_name(f"{name}.{os.getpid()}")
            draft.write_text(digest)
            draft.rename(record)
    return digest


def _hash(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def file_version(path: Path) -> tuple[int, ...]:
    """Changes when a file is replaced or written, whatever its modification time says."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
