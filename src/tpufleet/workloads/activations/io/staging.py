"""Where a process keeps what it is writing: a folder that is locked while the process lives.

A process that is killed cannot clean up, and its drafts may be gigabytes. The lock goes with the
process, so whoever comes next on that machine knows which folders nobody will come back for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import uuid
import weakref
from pathlib import Path

from tpufleet.errors import BadInput

LOCK_FILE = "lock"


class StagingFolder:
    """A folder of this process below a base that others use too; gone when this is."""

    def __init__(self, base: Path | None = None):
        """Without a base: for storages that have no disk of their own."""
        self._base = base
        self._folder: Path | None = None
        self._making = threading.Lock()  # writers work side by side, and must share one folder

    @property
    def path(self) -> Path:
        """Made when it is first asked for."""
        with self._making:
            if self._folder is None:
                self._folder = self._make(self._base or temporary_base())
            return self._folder

    def _make(self, base: Path) -> Path:
        base.mkdir(parents=True, exist_ok=True)
        remove_stale(base)
        folder = base / uuid.uuid4().hex
        # Locked before it shows under its name: nobody finds it without a living owner.
        fresh = base / f".{folder.name}"
        fresh.mkdir(mode=0o700, parents=True)
        lock = os.open(fresh / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        _try_lock(lock)  # a file system without locks keeps what is abandoned
        os.rename(fresh, folder)
        weakref.finalize(self, _remove, folder, lock)
        return folder


def remove_stale(base: Path) -> None:
    """Delete the folders of processes that have died."""
    for folder in base.glob("[!.]*"):
        try:
            lock = os.open(folder / LOCK_FILE, os.O_RDWR)
        except OSError:
            continue  # another process is deleting it
        if _try_lock(lock):
            _remove(folder, lock)
        else:
            os.close(lock)


def temporary_base() -> Path:
    """A base on a disk of this machine."""
    base = Path(tempfile.gettempdir()) / f"tpufleet-staging-{os.getuid()}"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if base.stat().st_uid != os.getuid():
        raise BadInput(f"{base} belongs to somebody else; set TMPDIR to a folder of your own")
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
    with contextlib.suppress(OSError):  # others are in it
        folder.parent.rmdir()
