"""Staging folders for files being written, each locked for the lifetime of its process.

A killed process cannot clean up, and its drafts may be gigabytes. Its lock is released by the
kernel, so the next process on the machine can find and delete stale folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import threading
import uuid
import weakref
from pathlib import Path

from tpufleet.errors import BadInput

LOCK_FILE = "lock"
_FOLDER_NAME = re.compile("[0-9a-f]{32}")


class StagingFolder:
    """A folder of this process below a shared base; deleted together with this object."""

    def __init__(self, base: Path | None = None):
        """Without a base, below the system's temporary folder."""
        self._base = base
        self._folder: Path | None = None
        self._creating = threading.Lock()  # concurrent writers must share one folder

    @property
    def path(self) -> Path:
        """Created on first use."""
        with self._creating:
            tries = 0
            while self._folder is None:
                try:
                    self._folder = self._create(self._base or temporary_base())
                except (FileExistsError, FileNotFoundError):
                    # Another process deletes the base whenever it leaves it empty.
                    tries += 1
                    if tries == 100:
                        raise
            return self._folder

    def _create(self, base: Path) -> Path:
        base.mkdir(parents=True, exist_ok=True)
        remove_stale(base)
        folder = base / uuid.uuid4().hex
        # Locked before it gets its final name, so that it never looks stale.
        hidden = base / f".{folder.name}"
        hidden.mkdir(mode=0o700, parents=True)
        lock = os.open(hidden / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        _try_lock(lock)  # without lock support, stale folders are never deleted
        os.rename(hidden, folder)
        weakref.finalize(self, _remove, folder, lock)
        return folder


def remove_stale(base: Path) -> None:
    """Delete the folders of processes that no longer run."""
    for folder in base.iterdir():
        if not _FOLDER_NAME.fullmatch(folder.name):
            continue
        try:
            lock = os.open(folder / LOCK_FILE, os.O_RDWR)
        except OSError:
            continue  # another process is deleting it
        if _try_lock(lock):
            _remove(folder, lock)
        else:
            os.close(lock)


def temporary_base() -> Path:
    """A per-user base in the system's temporary folder."""
    base = Path(tempfile.gettempdir()) / f"tpufleet-staging-{os.getuid()}"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if base.stat().st_uid != os.getuid():
        raise BadInput(f"{base} belongs to another user; set TMPDIR to a folder that you own")
    return base


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
    with contextlib.suppress(OSError):  # not empty: other processes use it
        folder.parent.rmdir()
